// Hits as they occur, the newest first, with the image if this page sent it.
import { element, nameOf } from "./elements.js";
import { apart } from "./numbers.js";
import { badge } from "./verdict.js";

const KEPT = 200;

export class Hits {
  element = element("ol", { class: "log", "aria-label": "Hits", "aria-live": "polite", "aria-relevant": "additions" });

  add(said, frame) {
    const [score, threshold] = apart(said.score, said.threshold);
    const when = new Date(typeof said.time === "number" ? 1000 * said.time : Date.now());
    this.element.prepend(
      element(
        "li",
        { class: "heard", "data-frame": said.frame },
        image(frame),
        element(
          "div",
          { class: "about" },
          element("span", { class: "bar" }, badge("yes"), nameOf(said.class, { class: "class-name" }),
            element("data", { class: "score", value: said.score }, score)),
          element("span", { class: "quiet small" },
            element("time", { datetime: isNaN(when) ? null : when.toISOString() }, isNaN(when) ? "" : when.toLocaleTimeString()),
            " · feed ", nameOf(said.feed), frame?.name ? " · " : "", frame?.name ? nameOf(frame.name) : "",
            ` · threshold ${threshold}`, said.label ? " · " : "", said.label ? nameOf(said.label) : ""),
        ),
      ),
    );
    while (this.element.children.length > KEPT) this.element.lastElementChild.remove();
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
