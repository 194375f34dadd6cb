// One verdict: yes or no as a word, a symbol and a color, and the score on a line.
import { element, nameOf } from "./elements.js";
import { count, formatPair, percent } from "./numbers.js";

const BADGES = { yes: ["✓", "Yes"], no: ["✕", "No"], open: ["–", "No verdict"] };

export function kindOf({ match }) {
  if (match === null) return "open";
  return match ? "yes" : "no";
}

export function badge(kind) {
  const [symbol, word] = BADGES[kind];
  return element("span", { class: `badge ${kind}` }, element("span", { "aria-hidden": "true" }, symbol), ` ${word}`);
}

// The score, with enough digits to distinguish it from the threshold; its `value` is exact.
export function scoreOf({ score, threshold }) {
  const shown = threshold === null ? score.toFixed(2) : formatPair(score, threshold)[0];
  return element("data", { class: "score", value: score, title: `score ${score}` }, shown);
}

// The score as a dot and the threshold as a vertical bar. Both are also shown as text.
export function line(verdict) {
  const { score, threshold } = verdict;
  const created = element("span", { class: `line ${kindOf(verdict)}`, "aria-hidden": "true" });
  // Set through the style object: the content security policy forbids inline style attributes.
  created.style.setProperty("--score", score);
  if (threshold !== null) {
    created.style.setProperty("--threshold", threshold);
    created.append(element("span", { class: "above" }));
  }
  created.append(element("span", { class: "dot" }));
  // Appended last, so that a nearby dot does not cover it.
  if (threshold !== null) created.append(element("span", { class: "threshold" }));
  return created;
}

// The threshold and its origin, with enough digits to distinguish it from the score.
export function thresholdText({ threshold, threshold_source: from }, score) {
  if (threshold === null) return "no threshold from validation: use a custom score";
  const origins = { class: "specific to this class", pooled: "pooled over all classes", request: "custom" };
  return `threshold ${formatPair(score, threshold)[1]}, ${origins[from]}`;
}

// How many validation samples the threshold for a recall was set on, and how many reached it. Empty
// for a custom threshold.
export function validationText(decided) {
  const { threshold, threshold_source: from, class_samples: samples, class_reached: reached } = decided;
  if (threshold === null || from === "request") return "";
  if (reached === null) return "Expected precision unknown: the bundle was exported by an older version of kway.";
  const isOwn = from === "class";
  const set = `Set on ${count(decided.threshold_samples, "validation sample")} of ${isOwn ? "this class" : "all classes"}`;
  const own = isOwn ? `${reached} of them` : `${reached} of the ${samples} of this class`;
  const others = `${count(decided.all_reached - reached, "sample")} of other classes`;
  const counts = samples ? `; ${own} and ${others} reached it` : `, but none of this class; ${others} reached it`;
  const mean = isOwn ? "" : " (averaged over all classes)";
  return `${set}${counts}. Expected precision ${precisionOf([decided])}${mean}.`;
}

// The expected precision, or its range over several classes.
export function precisionOf(classes) {
  const known = classes.map((one) => one.expected_precision).filter((one) => one !== null);
  if (known.length < classes.length) return "unknown";
  const shown = [Math.min(...known), Math.max(...known)].map((one) => percent(Number(one.toFixed(3))));
  return shown[0] === shown[1] ? shown[0] : `${shown[0]} to ${shown[1]}`;
}

// `decides`: whether the query has a threshold.
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
  if (threshold === null || from === "request") return thresholdText(decided, score);
  return `${thresholdText(decided, score)} · expected precision ${precisionOf([decided])}`;
}
