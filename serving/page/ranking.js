// A gallery's items for one class: a paged grid of hits. Items below the threshold are shown on
// request.
import { element, nameOf } from "./elements.js";
import { count } from "./numbers.js";
import { setScale } from "./scale.js";
import { badge, kindOf, line, scoreOf, shownInValidation, source } from "./verdict.js";

const HITS_A_PAGE = 24;

export class Ranking {
  #api;
  #gallery;
  #asked;
  #fields;
  #signal;
  #hits = [];
  #matches = null; // how many reach the threshold; null: unknown, or no decision
  #decided = null; // the class's threshold and its validation counts, as in the response
  #status = element("p", { role: "status" });
  #grid;
  #more = element("button", { type: "button", class: "button", onclick: () => this.#load() });

  // Loads the first page immediately; `signal` aborts it. `fields` are those of the decision.
  constructor(api, gallery, asked, fields, signal) {
    Object.assign(this, { title: asked.name });
    [this.#api, this.#gallery, this.#asked] = [api, gallery, asked];
    [this.#fields, this.#signal] = [fields, signal];
    this.#grid = element("ol", { class: gallery.reads === "images" ? "hits" : "hits of-texts" });
    const title = element("h2", {}, nameOf(asked.name));
    this.#more.hidden = true;
    this.element = element("section", { class: "ranking" }, title, this.#status, this.#grid, this.#more);
    this.#load();
  }

  get #decides() {
    return Object.keys(this.#fields).length > 0;
  }

  get #isBelow() {
    return this.#decides && this.#matches !== null && this.#hits.length >= this.#matches;
  }

  async #load() {
    this.#more.disabled = true;
    try {
      const isBelow = this.#isBelow;
      // Items below the threshold are requested without a decision. The order is the same, so they
      // continue at the offset where the matches end.
      const page = await this.#page(isBelow ? {} : this.#fields);
      if (!isBelow) this.#matches = page.matches;
      if (!isBelow) this.#decided = page;
      if (isBelow && this.#hits.length === this.#matches) this.#drawBoundary();
      const found = isBelow ? page.hits.map((hit) => this.#missed(hit)) : page.hits;
      const focused = document.activeElement === this.#more;
      this.#hits.push(...found);
      const items = found.map((hit) => this.#item(hit));
      this.#grid.append(...items);
      if (focused) items[0]?.focus(); // continue reading at the first new item
      setScale(this.#grid, this.#hits);
      this.#say();
    } catch (error) {
      if (error.name === "AbortError") return;
      this.#status.textContent = error.message;
      this.#status.className = "problem";
      this.#more.hidden = false;
      this.#more.textContent = "Try again";
    } finally {
      this.#more.disabled = false;
    }
  }

  async #page(fields) {
    const body = {
      classes: [this.#asked.id], ...fields, limit: HITS_A_PAGE, offset: this.#hits.length,
    };
    const path = `v1/galleries/${encodeURIComponent(this.#gallery.name)}/search`;
    const { results } = await this.#api.ask("POST", path, { body, signal: this.#signal });
    return results[0];
  }

  // A hit below the threshold; the server was not asked to decide it.
  #missed(hit) {
    const { threshold, threshold_source } = this.#decided;
    return { ...hit, threshold, threshold_source, match: false };
  }

  #item(hit) {
    const shown = hit.text === null ? this.#thumbnail(hit) : element("p", { class: "text", dir: "auto" }, hit.text);
    const name = nameOf(hit.text === null ? hit.name : `line ${hit.name}`, { class: "file", title: hit.name });
    const said = element("span", { class: "bar" }, this.#decides ? badge(kindOf(hit)) : null, scoreOf(hit));
    const kind = this.#decides ? kindOf(hit) : "open";
    return element("li", { class: `hit ${kind}`, tabindex: "-1" }, shown, said, line(hit), name);
  }

  #thumbnail(hit) {
    const frame = element("span", { class: "thumbnail" });
    if (this.#gallery.thumbnails) this.#fetchInto(frame, hit);
    return frame;
  }

  // Fetched here, because an <img> could not send the token.
  async #fetchInto(frame, hit) {
    const path = `v1/galleries/${encodeURIComponent(this.#gallery.name)}/items/${hit.item}/thumbnail`;
    try {
      const answer = await this.#api.fetch("GET", path, { signal: this.#signal });
      const url = URL.createObjectURL(await answer.blob());
      const image = element("img", { src: url, alt: "" });
      image.addEventListener("load", () => URL.revokeObjectURL(url));
      frame.append(image);
    } catch (error) {
      if (error.name !== "AbortError") frame.append(element("span", { class: "quiet small" }, error.message));
    }
  }

  #drawBoundary() {
    const words = `Below the ${this.#source()}`;
    this.#grid.append(element("li", { class: "boundary" }, element("span", {}, words)));
  }

  #source() {
    return source(this.#decided, this.#hits[0]?.score ?? this.#decided.threshold);
  }

  #say() {
    const items = count(this.#gallery.num_items, this.#gallery.reads.slice(0, -1));
    const shown = this.#hits.length;
    const all = this.#gallery.num_items;
    if (this.#decides && this.#matches !== null) {
      const verb = this.#matches === 1 ? "reaches" : "reach";
      this.#status.textContent = this.#matches
        ? `${this.#matches.toLocaleString("en")} of ${items} ${verb} the ${this.#source()}. ${shownInValidation(this.#decided)}`
        : `None of ${items} reaches the ${this.#source()}. ${shownInValidation(this.#decided)}`;
    } else if (this.#decides) {
      this.#status.textContent = `Validation gave this class no threshold: all of ${items} by their scores.`;
    } else {
      this.#status.textContent = `All of ${items}, the highest score first.`;
    }
    this.#status.className = "";
    this.#more.hidden = shown >= all;
    const isAtBoundary = this.#isBelow && shown === this.#matches;
    this.#more.textContent = isAtBoundary ? "Show what comes below" : `Show more (${shown.toLocaleString("en")} shown)`;
  }
}
