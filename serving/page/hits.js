// The log of hits, newest first, each with its image or text if this page sent it.
import { element, nameOf } from "./elements.js";
import { formatPair } from "./numbers.js";
import { badge } from "./verdict.js";

const MAX_HITS = 200;

export class Hits {
  element = element("ol", { class: "log", "aria-label": "Hits", "aria-live": "polite", "aria-relevant": "additions" });

  add(hit, frame) {
    const [score, threshold] = formatPair(hit.score, hit.threshold);
    const time = new Date(typeof hit.time === "number" ? 1000 * hit.time : Date.now());
    this.element.prepend(
      element(
        "li",
        { class: "log-entry", "data-frame": hit.frame },
        image(frame),
        element(
          "div",
          { class: "about" },
          element("span", { class: "bar" }, badge("yes"), nameOf(hit.class, { class: "class-name" }),
            element("data", { class: "score", value: hit.score }, score)),
          element("span", { class: "quiet small" },
            element("time", { datetime: isNaN(time) ? null : time.toISOString() }, isNaN(time) ? "" : time.toLocaleTimeString()),
            " · feed ", nameOf(hit.feed), frame?.name ? " · " : "", frame?.name ? nameOf(frame.name) : "",
            ` · threshold ${threshold}`, hit.label ? " · " : "", hit.label ? nameOf(hit.label) : ""),
        ),
      ),
    );
    while (this.element.children.length > MAX_HITS) this.element.lastElementChild.remove();
  }
}

function image(frame) {
  if (frame === undefined) return null;
  if (typeof frame.content === "string") return element("p", { class: "text", dir: "auto" }, frame.content);
  const url = URL.createObjectURL(frame.content);
  const image = element("img", { src: url, alt: "" });
  for (const event of ["load", "error"]) image.addEventListener(event, () => URL.revokeObjectURL(url));
  return element("span", { class: "thumbnail" }, image);
}
