// Class selection: search while typing, choose by keyboard or pointer, shown as chips. The combobox
// follows the ARIA pattern "list autocomplete".
import { byId, element, nameOf } from "./elements.js";
import { count } from "./numbers.js";

const SHOWN = 20;
const DEBOUNCE_MILLISECONDS = 120;

export class Picker extends EventTarget {
  #api;
  #limit;
  #input = byId("class-input");
  #list = byId("class-options");
  #options = [];
  #active = -1;
  #timer = 0;
  #search = new AbortController();
  #looked = null; // the text that the current options were found for

  chosen = [];

  constructor(api, limit) {
    super();
    this.#api = api;
    this.#limit = limit;
    this.#input.addEventListener("input", () => this.#soon());
    this.#input.addEventListener("keydown", (event) => this.#key(event));
    this.#input.addEventListener("click", () => this.#isOpen || this.#soon());
    this.#input.addEventListener("blur", () => this.#close());
    // Keep the focus in the field, wherever the pointer is pressed.
    byId("class-popup").addEventListener("pointerdown", (event) => event.preventDefault());
  }

  add(found) {
    if (this.chosen.some((one) => one.id === found.id)) {
      this.#say(`${found.name} is already there`);
    } else if (this.chosen.length >= this.#limit) {
      this.#say(`The server takes ${count(this.#limit, "class", "classes")} at most: remove one first`);
      return;
    } else {
      this.chosen.push(found);
      this.#say(`${found.name} is asked for`);
      this.#changed();
    }
    this.#input.value = "";
    this.#close();
  }

  remove(id) {
    this.chosen = this.chosen.filter((one) => one.id !== id);
    this.#changed();
    this.#input.focus();
  }

  get #isOpen() {
    return !byId("class-popup").hidden;
  }

  #changed() {
    byId("chips").replaceChildren(...this.chosen.map((one) => this.#chip(one)));
    this.#input.placeholder = this.chosen.length ? "or of …" : "Type a class";
    this.dispatchEvent(new Event("change"));
  }

  #chip({ id, name }) {
    const remove = element("button", {
      type: "button",
      "aria-label": `Remove ${name}`,
      onclick: () => this.remove(id),
    }, "×");
    return element("li", { class: "chip" }, nameOf(name), remove);
  }

  #soon() {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#find(this.#input.value.trim()), DEBOUNCE_MILLISECONDS);
  }

  async #find(text) {
    this.#search.abort();
    this.#search = new AbortController();
    try {
      this.#show(text, await this.#found(text, SHOWN, this.#search.signal));
    } catch (error) {
      if (error.name !== "AbortError") this.#say(error.message);
    }
  }

  #found(text, limit, signal) {
    const query = new URLSearchParams({ search: text.slice(0, 200), limit });
    return this.#api.ask("GET", `v1/classes?${query}`, { signal });
  }

  #show(text, { classes, total }) {
    if (document.activeElement !== this.#input) return;
    this.#looked = text;
    this.#options = classes;
    this.#list.replaceChildren(...classes.map((one, place) => this.#option(one, place, text)));
    const more = total - classes.length;
    byId("class-more").textContent = total
      ? more > 0 ? `and ${more.toLocaleString("en")} more: type on` : ""
      : `No class has “${text}” in its name.`;
    byId("class-popup").hidden = false;
    this.#input.setAttribute("aria-expanded", "true");
    this.#say(total ? `${count(total, "class", "classes")} found` : byId("class-more").textContent);
    this.#activate(text && classes.length ? 0 : -1);
  }

  #option(one, place, text) {
    const said = Object.values(one.attributes).join(", ");
    const label = element("span", { class: "found" }, marked(one.name, text));
    const aside = said && said !== one.name ? nameOf(said, { class: "quiet small" }) : null;
    return element("li", {
      id: `class-option-${place}`,
      role: "option",
      "aria-selected": "false",
      onclick: () => this.add(one),
      onpointermove: () => this.#active === place || this.#activate(place),
    }, label, aside);
  }

  #activate(place) {
    this.#list.children[this.#active]?.setAttribute("aria-selected", "false");
    this.#active = place;
    const option = this.#list.children[place];
    option?.setAttribute("aria-selected", "true");
    option?.scrollIntoView({ block: "nearest" });
    if (option) this.#input.setAttribute("aria-activedescendant", option.id);
    else this.#input.removeAttribute("aria-activedescendant");
  }

  #key(event) {
    if (event.isComposing) return; // this Enter ends an input method's composition
    const last = this.#options.length - 1;
    const moves = {
      ArrowDown: this.#active >= last ? 0 : this.#active + 1,
      ArrowUp: this.#active <= 0 ? last : this.#active - 1,
      PageDown: Math.min(last, this.#active + 8),
      PageUp: Math.max(0, this.#active - 8),
    };
    if (event.key in moves) {
      event.preventDefault();
      if (this.#isOpen) this.#activate(moves[event.key]);
      else this.#soon();
    } else if (event.key === "Enter") {
      event.preventDefault();
      this.#choose();
    } else if (event.key === "Escape") {
      if (!this.#isOpen) this.#input.value = "";
      this.#close();
    } else if (event.key === "Backspace" && !this.#input.value && this.chosen.length) {
      this.remove(this.chosen.at(-1).id);
    }
  }

  // Choose the active option or, if the options are older than the text, the first result of a new
  // search. The focus may have moved elsewhere by then.
  async #choose() {
    const text = this.#input.value.trim();
    if (text === this.#looked || !text) {
      if (this.#options[this.#active]) this.add(this.#options[this.#active]);
      return;
    }
    this.#close();
    try {
      const { classes } = await this.#found(text, 1);
      if (this.#input.value.trim() !== text) return;
      if (classes.length) this.add(classes[0]);
      else this.#soon();
    } catch (error) {
      this.#say(error.message);
    }
  }

  #close() {
    clearTimeout(this.#timer);
    this.#search.abort();
    this.#looked = null;
    this.#options = [];
    byId("class-popup").hidden = true;
    this.#input.setAttribute("aria-expanded", "false");
    this.#activate(-1);
  }

  #say(text) {
    byId("class-status").textContent = text;
  }
}

// The name, with the typed part in a <mark>.
function marked(name, text) {
  const lower = name.toLowerCase();
  const place = text && lower.length === name.length ? lower.indexOf(text.toLowerCase()) : -1;
  if (place < 0) return nameOf(name);
  const end = place + text.length;
  const mark = element("mark", {}, name.slice(place, end));
  return element("bdi", {}, name.slice(0, place), mark, name.slice(end));
}
