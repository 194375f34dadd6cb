// The "Gallery" tab: the items of a gallery, ranked by score for each selected class.
import { RejectedError } from "./api.js";
import { byId, element } from "./elements.js";
import { Ranking } from "./ranking.js";
import { count } from "./numbers.js";

export class GalleryPanel {
  #api;
  #galleries;
  #chosen;
  #query = null;
  #isShown = false;
  #isStale = true;
  #abort = new AbortController();
  #rankings = element("div", { class: "rankings" });

  // Null if the server has no galleries.
  static async open(api) {
    try {
      const { galleries } = await api.requestJson("GET", "v1/galleries");
      return galleries.length ? new GalleryPanel(api, galleries) : null;
    } catch (error) {
      if (error instanceof RejectedError && error.status === 404) return null;
      throw error;
    }
  }

  constructor(api, galleries) {
    this.#api = api;
    this.#galleries = galleries;
    this.#chosen = galleries[0];
    const panel = byId("panel-gallery");
    panel.append(this.#galleryChoice(), this.#rankings);
    panel.addEventListener("shown", () => this.#setShown(true));
    panel.addEventListener("hidden", () => this.#setShown(false));
  }

  setQuery(query) {
    this.#query = query;
    this.#isStale = true;
    this.#search();
  }

  #setShown(isShown) {
    this.#isShown = isShown;
    this.#search();
  }

  #galleryChoice() {
    const options = this.#galleries.map(({ name, num_items: items, reads }) =>
      element("option", { value: name }, `${name} · ${count(items, reads.slice(0, -1))}`),
    );
    const select = element("select", {
      id: "gallery-choice",
      onchange: () => {
        this.#chosen = this.#galleries.find(({ name }) => name === select.value);
        this.#isStale = true;
        this.#search();
      },
    }, ...options);
    return element("p", { class: "bar" }, element("label", { for: "gallery-choice" }, "Gallery"), " ", select);
  }

  // Do not search while the tab is hidden.
  #search() {
    if (!this.#isShown || !this.#isStale) return;
    this.#isStale = false;
    this.#abort.abort();
    this.#abort = new AbortController();
    const { classes, fields, isComplete } = this.#query;
    if (!classes.length || !isComplete) {
      const text = isComplete ? "Choose a class above to search the gallery." : "Enter a score threshold above.";
      this.#rankings.replaceChildren(element("p", { class: "quiet" }, text));
      return;
    }
    const signal = this.#abort.signal;
    const rankings = classes.map((one) => new Ranking(this.#api, this.#chosen, one, fields, signal));
    this.#rankings.replaceChildren(...rankings.map((one) => one.element));
  }
}
