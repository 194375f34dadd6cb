// The tab bar, following the ARIA pattern: arrow keys select the next or previous tab, Home and End
// the first or last one.
import { byId } from "./elements.js";

export class Tabs {
  #names;
  open;

  // `names`: the available tabs. A single tab is shown without a tab bar.
  constructor(names) {
    this.#names = names;
    byId("tabs").hidden = names.length < 2;
    for (const name of names) {
      const tab = byId(`tab-${name}`);
      tab.hidden = false;
      tab.addEventListener("click", () => this.show(name));
      tab.addEventListener("keydown", (event) => this.#key(event));
    }
    this.show(names[0]);
  }

  show(name) {
    this.open = name;
    for (const one of this.#names) {
      byId(`tab-${one}`).setAttribute("aria-selected", String(one === name));
      byId(`tab-${one}`).tabIndex = one === name ? 0 : -1;
      byId(`panel-${one}`).hidden = one !== name;
      byId(`panel-${one}`).dispatchEvent(new Event(one === name ? "shown" : "hidden"));
    }
  }

  #key(event) {
    const [index, last] = [this.#names.indexOf(this.open), this.#names.length - 1];
    const moves = {
      ArrowRight: index === last ? 0 : index + 1,
      ArrowLeft: index === 0 ? last : index - 1,
      Home: 0,
      End: last,
    };
    if (!(event.key in moves)) return;
    event.preventDefault();
    this.show(this.#names[moves[event.key]]);
    byId(`tab-${this.open}`).focus();
  }
}
