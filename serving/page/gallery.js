// The "Gallery" tab: the items of a gallery, ranked by score for each selected class.
import { byId, count, element, nameOf } from "./elements.js";
import { badge, kindOf, line, scoreOf, setScale, thresholdText, validationText } from "./verdict.js";

const HITS_PER_PAGE = 24;

export class GalleryPanel {
  #api;
  #galleries;
  #select;
  #query = null;
  #isStale = true;
  #abort = new AbortController();
  #rankings = element("div", { class: "rankings" });

  // Null if the server has no galleries.
  static async open(api) {
    const { galleries } = await api.requestJson("GET", "v1/galleries");
    return galleries.length ? new GalleryPanel(api, galleries) : null;
  }

  constructor(api, galleries) {
    this.#api = api;
    this.#galleries = galleries;
    const options = galleries.map(({ name, num_items: items, reads }) =>
      element("option", { value: name }, `${name} · ${count(items, reads.slice(0, -1))}`),
    );
    this.#select = element("select", { id: "gallery-choice", onchange: () => this.setQuery(this.#query) }, ...options);
    const label = element("label", { for: "gallery-choice" }, "Gallery");
    byId("panel-gallery").append(element("p", { class: "bar" }, label, " ", this.#select), this.#rankings);
    byId("panel-gallery").addEventListener("shown", () => this.#search());
  }

  setQuery(query) {
    this.#query = query;
    this.#isStale = true;
    this.#search();
  }

  // Do not search while the tab is hidden.
  #search() {
    if (byId("panel-gallery").hidden || !this.#isStale) return;
    this.#isStale = false;
    this.#abort.abort();
    this.#abort = new AbortController();
    const { classes, fields, isComplete } = this.#query;
    if (!classes.length || !isComplete) {
      const text = isComplete ? "Choose a class above to search the gallery." : "Enter a score threshold above.";
      this.#rankings.replaceChildren(element("p", { class: "quiet" }, text));
      return;
    }
    const [chosen, { signal }] = [this.#galleries[this.#select.selectedIndex], this.#abort];
    this.#rankings.replaceChildren(...classes.map((one) => ranking(this.#api, chosen, one, fields, signal)));
  }
}

// A gallery's items for one class, as a paged grid of hits. Items below the threshold are loaded on
// request. Returns a section that loads its first page immediately. `signal` aborts all requests. `fields`
// contains the fields of the decision.
function ranking(api, gallery, target, fields, signal) {
  const path = `v1/galleries/${encodeURIComponent(gallery.name)}`;
  const decides = Object.keys(fields).length > 0;
  const items = count(gallery.num_items, gallery.reads.slice(0, -1));
  const hits = [];
  let decided = null; // the first response, with the class's threshold and validation counts
  const status = element("p", { role: "status" });
  const grid = element("ol", { class: gallery.reads === "images" ? "hits" : "hits of-texts" });
  const more = element("button", { type: "button", class: "button", hidden: true, onclick: load });
  const bound = () => thresholdText(decided, hits[0]?.score ?? decided.threshold);

  async function load() {
    more.disabled = true;
    // Without a threshold, or if it is unknown, `matches` is null.
    const isPastMatches = decided !== null && decided.matches !== null && hits.length >= decided.matches;
    try {
      // To get the items below the threshold, send the request without a threshold. The order is the
      // same, so these items start at the offset where the matches end.
      const page = await search(isPastMatches ? {} : fields);
      if (!isPastMatches) decided = page;
      else if (hits.length === decided.matches) {
        grid.append(element("li", { class: "boundary" }, element("span", {}, `Below the ${bound()}`)));
      }
      const { threshold, threshold_source } = decided;
      const found = isPastMatches ? page.hits.map((hit) => ({ ...hit, threshold, threshold_source, match: false })) : page.hits;
      const focused = document.activeElement === more;
      hits.push(...found);
      const added = found.map(itemOf);
      grid.append(...added);
      if (focused) added[0]?.focus(); // keyboard users continue at the first new item
      setScale(grid, hits);
      showStatus();
    } catch (error) {
      if (error.name === "AbortError") return;
      status.textContent = error.message;
      status.className = "problem";
      more.hidden = false;
      more.textContent = "Try again";
    } finally {
      more.disabled = false;
    }
  }

  async function search(rule) {
    // The page shows the number of matches, which an approximate search does not count.
    const body = { classes: [target.id], ...rule, limit: HITS_PER_PAGE, offset: hits.length, exact: true };
    return (await api.requestJson("POST", `${path}/search`, { body, signal })).results[0];
  }

  function itemOf(hit) {
    const isText = hit.text !== null;
    const preview = isText ? element("p", { class: "text", dir: "auto" }, hit.text) : element("span", { class: "thumbnail" });
    if (!isText && gallery.thumbnails) loadThumbnail(preview, hit);
    const kind = decides ? kindOf(hit) : "open";
    const verdict = element("span", { class: "bar" }, decides ? badge(kind) : null, scoreOf(hit));
    const name = nameOf(isText ? `line ${hit.name}` : hit.name, { class: "file", title: hit.name });
    return element("li", { class: `hit ${kind}`, tabindex: "-1" }, preview, verdict, line(hit), name);
  }

  // Fetch the thumbnail with a separate request, because an <img> cannot send the token.
  async function loadThumbnail(frame, hit) {
    try {
      const response = await api.request("GET", `${path}/items/${hit.id}/thumbnail`, { signal });
      const url = URL.createObjectURL(await response.blob());
      const image = element("img", { src: url, alt: "" });
      image.addEventListener("load", () => URL.revokeObjectURL(url));
      frame.append(image);
    } catch (error) {
      if (error.name !== "AbortError") frame.append(element("span", { class: "quiet small" }, error.message));
    }
  }

  function showStatus() {
    const { matches, reason } = decided;
    let text = `${items}, sorted by descending score.`;
    if (decides && matches !== null) {
      const share = matches ? `${matches.toLocaleString("en")} of ${items} ${matches === 1 ? "reaches" : "reach"}` : `None of ${items} reaches`;
      text = `${share} the ${bound()}. ${validationText(decided)}`;
    } else if (decides) {
      text = reason ?? `This class does not have a threshold from validation. ${text}`;
    }
    status.textContent = text;
    status.className = "";
    more.hidden = hits.length >= gallery.num_items;
    const isAtBoundary = decides && hits.length === matches;
    more.textContent = isAtBoundary ? "Show items below the threshold" : `Show more (${hits.length.toLocaleString("en")} shown)`;
  }

  load();
  return element("section", { class: "ranking" }, element("h2", {}, nameOf(target.name)), status, grid, more);
}
