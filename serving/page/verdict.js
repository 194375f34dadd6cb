// One verdict on the page: yes or no as a word, a sign and a color, and the score on a line.
import { element, nameOf } from "./elements.js";
import { apart, count, percent } from "./numbers.js";

const BADGES = { yes: ["✓", "Yes"], no: ["✕", "No"], open: ["–", "No verdict"] };

export function kindOf({ match }) {
  if (match === null) return "open";
  return match ? "yes" : "no";
}

export function badge(kind) {
  const [sign, word] = BADGES[kind];
  return element("span", { class: `badge ${kind}` }, element("span", { "aria-hidden": "true" }, sign), ` ${word}`);
}

// The score, with enough digits to distinguish it from the threshold; its `value` is exact.
export function scoreOf({ score, threshold }) {
  const shown = threshold === null ? score.toFixed(2) : apart(score, threshold)[0];
  return element("data", { class: "score", value: score, title: `score ${score}` }, shown);
}

// The score as a dot and the threshold as a vertical bar. Both are also given as text.
export function line(verdict) {
  const { score, threshold } = verdict;
  const made = element("span", { class: `line ${kindOf(verdict)}`, "aria-hidden": "true" });
  // Set with the style object: the content security policy forbids inline style attributes.
  made.style.setProperty("--score", score);
  if (threshold !== null) {
    made.style.setProperty("--threshold", threshold);
    made.append(element("span", { class: "above" }));
  }
  made.append(element("span", { class: "dot" }));
  // Append it last, so that a dot close to it does not cover it.
  if (threshold !== null) made.append(element("span", { class: "threshold" }));
  return made;
}

// The threshold and its origin, with enough digits to distinguish it from the score.
export function source({ threshold, threshold_source: from }, score) {
  if (threshold === null) return "validation gave this class no threshold: decide by a score";
  const origins = { class: "the class’s own", pooled: "pooled over all classes", request: "your own" };
  return `threshold ${apart(score, threshold)[1]}, ${origins[from]}`;
}

// Sentences about the validation samples that set the threshold of a recall and how many reach it;
// empty for any other threshold.
export function shownInValidation(decided) {
  const { threshold, threshold_source: from, class_samples: samples, class_reached: reached } = decided;
  if (threshold === null || from === "request") return "";
  if (reached === null) return "Expected precision unknown: the bundle was exported by an older kway.";
  const isOwn = from === "class";
  const set = `Set on ${count(decided.threshold_samples, "validation sample")} of ${isOwn ? "this class" : "all classes"}`;
  const whose = isOwn ? "of these" : `of this class’s ${samples}`;
  const own = samples ? `${reached} ${whose} reached it` : "none was of this class";
  const others = `${count(decided.all_reached - reached, "sample")} of other classes did`;
  const mean = isOwn ? "" : ", the mean over all classes";
  return `${set}: ${own}; ${others}. Expected precision ${precisionOf([decided])}${mean}.`;
}

// The expected precision, or its range over several classes.
export function precisionOf(classes) {
  const known = classes.map((one) => one.expected_precision).filter((one) => one !== null);
  if (known.length < classes.length) return "unknown";
  const shown = [Math.min(...known), Math.max(...known)].map((one) => percent(Number(one.toFixed(3))));
  return shown[0] === shown[1] ? shown[0] : `${shown[0]} to ${shown[1]}`;
}

// `decides`: whether the query asks for a yes or no.
export function verdictRow(verdict, decides) {
  return element(
    "li",
    { class: `verdict ${kindOf(verdict)}`, "data-class-id": verdict.class_id },
    decides ? badge(kindOf(verdict)) : null,
    nameOf(verdict.class, { class: "class-name" }),
    scoreOf(verdict),
    line(verdict),
    decides ? element("span", { class: "source quiet small" }, explanation(verdict)) : null,
  );
}

function explanation({ decided, score }) {
  const { threshold, threshold_source: from } = decided;
  if (threshold === null || from === "request") return source(decided, score);
  return `${source(decided, score)} · expected precision ${precisionOf([decided])}`;
}
