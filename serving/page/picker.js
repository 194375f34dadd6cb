// Class selection: the user searches by typing and chooses with the keyboard or a pointer. Selected
// classes are shown as chips. The combobox follows the ARIA pattern "list autocomplete".
import { byId, count, element, nameOf } from "./elements.js";

const MAX_OPTIONS = 20;
const DEBOUNCE_MILLISECONDS = 120;

export class Picker extends EventTarget {
  #api;
  #limit;
  #input = byId("class-input");
  #list = byId("class-options");
  #options = [];
  #active = -1;
  #timer = 0;
  #abort = new AbortController();
  #searchedText = null; // the search text of the current options

  chosen = [];

  constructor(api, limit) {
    super();
    this.#api = api;
    this.#limit = limit;
    this.#input.addEventListener("input", () => this.#scheduleSearch());
    this.#input.addEventListener("keydown", (event) => this.#key(event));
    this.#input.addEventListener("click", () => this.#isOpen || this.#scheduleSearch());
    this.#input.addEventListener("blur", () => this.#close());
    // Keep focus in the field while the pointer is used in the popup.
    byId("class-popup").addEventListener("pointerdown", (event) => event.preventDefault());
  }

  add(added) {
    const isChosen = this.chosen.some((one) => one.id === added.id);
    if (!isChosen && this.chosen.length >= this.#limit) {
      this.#announce(`The server accepts at most ${count(this.#limit, "class", "classes")}: remove one first`);
      return;
    }
    if (!isChosen) this.chosen.push(added);
    this.#announce(`${added.name} ${isChosen ? "is already selected" : "selected"}`);
    this.#changed();
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
    this.#input.placeholder = this.chosen.length ? "Add another class" : "Search for a class";
    this.dispatchEvent(new Event("change"));
  }

  #chip({ id, name }) {
    const attributes = { type: "button", "aria-label": `Remove ${name}`, onclick: () => this.remove(id) };
    return element("li", { class: "chip" }, nameOf(name), element("button", attributes, "×"));
  }

  #scheduleSearch() {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => {
      this.#abort.abort();
      this.#abort = new AbortController();
      this.#search(this.#input.value.trim(), this.#abort.signal);
    }, DEBOUNCE_MILLISECONDS);
  }

  // Show the classes whose names contain the text, and return them.
  async #search(text, signal) {
    const query = new URLSearchParams({ search: text.slice(0, 200), limit: MAX_OPTIONS });
    try {
      const found = await this.#api.requestJson("GET", `v1/classes?${query}`, { signal });
      this.#show(text, found);
      return found.classes;
    } catch (error) {
      if (error.name !== "AbortError") this.#announce(error.message);
      return [];
    }
  }

  #show(text, { classes, total }) {
    if (document.activeElement !== this.#input) return;
    this.#searchedText = text;
    this.#options = classes;
    this.#list.replaceChildren(...classes.map((one, index) => this.#option(one, index)));
    const more = total - classes.length;
    const hint = more ? `${more.toLocaleString("en")} more: continue typing to narrow the list` : "";
    byId("class-more").textContent = total ? hint : `No class name contains “${text}”.`;
    byId("class-popup").hidden = false;
    this.#input.setAttribute("aria-expanded", "true");
    this.#announce(total ? `${count(total, "class", "classes")} found` : byId("class-more").textContent);
    this.#activate(text && classes.length ? 0 : -1);
  }

  #option(one, index) {
    const attributes = Object.values(one.attributes).join(", ");
    const label = element("span", { class: "option-name" }, nameOf(one.name));
    const aside = attributes && attributes !== one.name ? nameOf(attributes, { class: "quiet small" }) : null;
    return element("li", {
      id: `class-option-${index}`, role: "option", "aria-selected": "false",
      onclick: () => this.add(one),
      onpointermove: () => this.#active === index || this.#activate(index),
    }, label, aside);
  }

  #activate(index) {
    this.#list.children[this.#active]?.setAttribute("aria-selected", "false");
    this.#active = index;
    const option = this.#list.children[index];
    option?.setAttribute("aria-selected", "true");
    option?.scrollIntoView({ block: "nearest" });
    if (option) this.#input.setAttribute("aria-activedescendant", option.id);
    else this.#input.removeAttribute("aria-activedescendant");
  }

  #key(event) {
    if (event.isComposing) return; // this key press belongs to an input method's composition
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      const [last, next] = [this.#options.length - 1, this.#active + (event.key === "ArrowDown" ? 1 : -1)];
      if (!this.#isOpen) this.#scheduleSearch();
      else this.#activate(next > last ? 0 : next < 0 ? last : next);
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

  // Select the active option or, if the text has changed since the search, the first result of a new
  // search. Focus may have moved by then.
  async #choose() {
    clearTimeout(this.#timer);
    const text = this.#input.value.trim();
    const isNew = text && text !== this.#searchedText;
    const chosen = isNew ? (await this.#search(text))[0] : this.#options[this.#active];
    if (chosen && text === this.#input.value.trim()) this.add(chosen);
  }

  #close() {
    clearTimeout(this.#timer);
    this.#abort.abort();
    this.#searchedText = null;
    this.#options = [];
    byId("class-popup").hidden = true;
    this.#input.setAttribute("aria-expanded", "false");
    this.#activate(-1);
  }

  #announce(text) {
    byId("class-status").textContent = text;
  }
}
