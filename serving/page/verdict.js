// One verdict on the page: yes or no in a word, a sign and a colour; the score on a line.
import { element, nameOf } from "./elements.js";
import { apart, count } from "./numbers.js";

const BADGES = { yes: ["✓", "Yes"], no: ["✕", "No"], open: ["–", "No verdict"] };

export function kindOf({ match }) {
  if (match === null) return "open";
  return match ? "yes" : "no";
}

export function badge(kind) {
  const [sign, word] = BADGES[kind];
  return element("span", { class: `badge ${kind}` }, element("span", { "aria-hidden": "true" }, sign), ` ${word}`);
}

// The score, with as many digits as tell it from the threshold; its `value` is exact.
export function scoreOf({ score, threshold }) {
  const shown = threshold === null ? score.toFixed(2) : apart(score, threshold)[0];
  return element("data", { class: "score", value: score, title: `score ${score}` }, shown);
}

// The score as a dot, the threshold as a bar across; what they say stands in words beside.
export function line(verdict) {
  const { score, threshold } = verdict;
  const made = element("span", { class: `line ${kindOf(verdict)}`, "aria-hidden": "true" });
  // By the style object: a style attribute would be inline style, which the page's policy forbids.
  made.style.setProperty("--score", score);
  if (threshold !== null) {
    made.style.setProperty("--threshold", threshold);
    made.append(element("span", { class: "above" }));
  }
  made.append(element("span", { class: "dot" }));
  // Last, for a dot that nearly reaches it must not hide it.
  if (threshold !== null) made.append(element("span", { class: "threshold" }));
  return made;
}

// Where the threshold is from. `positives`: the class's samples in validation, null if not known.
export function source({ threshold, threshold_source: from, score }, positives) {
  if (threshold === null) return "validation gave this class no threshold: decide by a score";
  const shown = `threshold ${apart(score, threshold)[1]}`;
  if (from === "request") return `${shown}, your own`;
  if (from === "class") {
    const samples = positives ? ` (${count(positives, "validation sample")})` : "";
    return `${shown}, the class’s own${samples}`;
  }
  const few = positives ? `only ${count(positives, "sample")}` : "no sample";
  return `${shown}, pooled over all classes: validation had ${few} of this one`;
}

// `decides`: whether the question asked for a yes or no at all.
export function verdictRow(verdict, positives, decides) {
  return element(
    "li",
    { class: `verdict ${kindOf(verdict)}`, "data-class-id": verdict.class_id },
    decides ? badge(kindOf(verdict)) : null,
    nameOf(verdict.class, { class: "class-name" }),
    scoreOf(verdict),
    line(verdict),
    decides ? element("span", { class: "source quiet small" }, source(verdict, positives)) : null,
  );
}
