// The "Gallery" tab: the items of a collection for each class, in descending order of score.
import { Refused } from "./api.js";
import { byId, element } from "./elements.js";
import { Ranking } from "./ranking.js";
import { count } from "./numbers.js";

export class GalleryRoom {
  #api;
  #galleries;
  #chosen;
  #question = null;
  #isShown = false;
  #isStale = true;
  #stop = new AbortController();
  #found = element("div", { class: "rankings" });

  // Null if the server has no galleries.
  static async open(api) {
    try {
      const { galleries } = await api.ask("GET", "v1/galleries");
      return galleries.length ? new GalleryRoom(api, galleries) : null;
    } catch (error) {
      if (error instanceof Refused && error.status === 404) return null;
      throw error;
    }
  }

  constructor(api, galleries) {
    this.#api = api;
    this.#galleries = galleries;
    this.#chosen = galleries[0];
    const room = byId("room-gallery");
    room.append(this.#choice(), this.#found);
    room.addEventListener("shown", () => this.#show(true));
    room.addEventListener("left", () => this.#show(false));
  }

  setQuestion(question) {
    this.#question = question;
    this.#isStale = true;
    this.#search();
  }

  #show(isShown) {
    this.#isShown = isShown;
    this.#search();
  }

  #choice() {
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
    return element("p", { class: "bar" }, element("label", { for: "gallery-choice" }, "In the gallery"), " ", select);
  }

  // Do not search while the tab is hidden.
  #search() {
    if (!this.#isShown || !this.#isStale) return;
    this.#isStale = false;
    this.#stop.abort();
    this.#stop = new AbortController();
    const { classes, fields, isComplete } = this.#question;
    if (!classes.length || !isComplete) {
      const what = isComplete ? "Choose a class above to see where it is." : "Type the score that decides.";
      this.#found.replaceChildren(element("p", { class: "quiet" }, what));
      return;
    }
    const signal = this.#stop.signal;
    const rankings = classes.map((one) => new Ranking(this.#api, this.#chosen, one, fields, signal));
    this.#found.replaceChildren(...rankings.map((one) => one.element));
  }
}
