// A gallery's items for one class, as a paged grid of hits. Items below the threshold are loaded on
// request.
import { element, nameOf } from "./elements.js";
import { count } from "./numbers.js";
import { setScale } from "./scale.js";
import { badge, kindOf, line, scoreOf, thresholdText, validationText } from "./verdict.js";

const HITS_PER_PAGE = 24;

export class Ranking {
  #api;
  #gallery;
  #targetClass;
  #fields;
  #signal;
  #hits = [];
  #matches = null; // the number of items that reach the threshold; null: unknown or no threshold
  #decided = null; // the response with the class's threshold and validation counts
  #status = element("p", { role: "status" });
  #grid;
  #more = element("button", { type: "button", class: "button", onclick: () => this.#load() });

  // Loads the first page immediately. `signal` aborts all requests. `fields` contains the fields of
  // the decision.
  constructor(api, gallery, targetClass, fields, signal) {
    Object.assign(this, { title: targetClass.name });
    [this.#api, this.#gallery, this.#targetClass] = [api, gallery, targetClass];
    [this.#fields, this.#signal] = [fields, signal];
    this.#grid = element("ol", { class: gallery.reads === "images" ? "hits" : "hits of-texts" });
    const title = element("h2", {}, nameOf(targetClass.name));
    this.#more.hidden = true;
    this.element = element("section", { class: "ranking" }, title, this.#status, this.#grid, this.#more);
    this.#load();
  }

  get #decides() {
    return Object.keys(this.#fields).length > 0;
  }

  get #isPastMatches() {
    return this.#decides && this.#matches !== null && this.#hits.length >= this.#matches;
  }

  async #load() {
    this.#more.disabled = true;
    try {
      const isPastMatches = this.#isPastMatches;
      // To get the items below the threshold, send the request without a threshold. The order is the
      // same, so these items start at the offset where the matches end.
      const page = await this.#page(isPastMatches ? {} : this.#fields);
      if (!isPastMatches) this.#matches = page.matches;
      if (!isPastMatches) this.#decided = page;
      if (isPastMatches && this.#hits.length === this.#matches) this.#drawBoundary();
      const hits = isPastMatches ? page.hits.map((hit) => this.#asNonMatch(hit)) : page.hits;
      const focused = document.activeElement === this.#more;
      this.#hits.push(...hits);
      const items = hits.map((hit) => this.#item(hit));
      this.#grid.append(...items);
      if (focused) items[0]?.focus(); // keyboard users continue at the first new item
      setScale(this.#grid, this.#hits);
      this.#updateStatus();
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
      classes: [this.#targetClass.id], ...fields, limit: HITS_PER_PAGE, offset: this.#hits.length,
      exact: true, // the page shows the number of matches, which an approximate search does not count
    };
    const path = `v1/galleries/${encodeURIComponent(this.#gallery.name)}/search`;
    const { results } = await this.#api.requestJson("POST", path, { body, signal: this.#signal });
    return results[0];
  }

  // Add the decision to a hit below the threshold, which was requested without a threshold.
  #asNonMatch(hit) {
    const { threshold, threshold_source } = this.#decided;
    return { ...hit, threshold, threshold_source, match: false };
  }

  #item(hit) {
    const preview = hit.text === null ? this.#thumbnail(hit) : element("p", { class: "text", dir: "auto" }, hit.text);
    const name = nameOf(hit.text === null ? hit.name : `line ${hit.name}`, { class: "file", title: hit.name });
    const verdict = element("span", { class: "bar" }, this.#decides ? badge(kindOf(hit)) : null, scoreOf(hit));
    const kind = this.#decides ? kindOf(hit) : "open";
    return element("li", { class: `hit ${kind}`, tabindex: "-1" }, preview, verdict, line(hit), name);
  }

  #thumbnail(hit) {
    const frame = element("span", { class: "thumbnail" });
    if (this.#gallery.thumbnails) this.#loadThumbnail(frame, hit);
    return frame;
  }

  // Fetch the thumbnail with a separate request, because an <img> cannot send the token.
  async #loadThumbnail(frame, hit) {
    const path = `v1/galleries/${encodeURIComponent(this.#gallery.name)}/items/${hit.id}/thumbnail`;
    try {
      const response = await this.#api.request("GET", path, { signal: this.#signal });
      const url = URL.createObjectURL(await response.blob());
      const image = element("img", { src: url, alt: "" });
      image.addEventListener("load", () => URL.revokeObjectURL(url));
      frame.append(image);
    } catch (error) {
      if (error.name !== "AbortError") frame.append(element("span", { class: "quiet small" }, error.message));
    }
  }

  #drawBoundary() {
    const text = `Below the ${this.#thresholdText()}`;
    this.#grid.append(element("li", { class: "boundary" }, element("span", {}, text)));
  }

  #thresholdText() {
    return thresholdText(this.#decided, this.#hits[0]?.score ?? this.#decided.threshold);
  }

  #updateStatus() {
    const items = count(this.#gallery.num_items, this.#gallery.reads.slice(0, -1));
    const shown = this.#hits.length;
    const all = this.#gallery.num_items;
    if (this.#decides && this.#matches !== null) {
      const verb = this.#matches === 1 ? "reaches" : "reach";
      this.#status.textContent = this.#matches
        ? `${this.#matches.toLocaleString("en")} of ${items} ${verb} the ${this.#thresholdText()}. ${validationText(this.#decided)}`
        : `None of ${items} reaches the ${this.#thresholdText()}. ${validationText(this.#decided)}`;
    } else if (this.#decided?.reason) {
      this.#status.textContent = this.#decided.reason;
    } else if (this.#decides) {
      this.#status.textContent = `This class does not have a threshold from validation. ${items}, sorted by descending score.`;
    } else {
      this.#status.textContent = `${items}, sorted by descending score.`;
    }
    this.#status.className = "";
    this.#more.hidden = shown >= all;
    const isAtBoundary = this.#isPastMatches && shown === this.#matches;
    this.#more.textContent = isAtBoundary ? "Show items below the threshold" : `Show more (${shown.toLocaleString("en")} shown)`;
  }
}
