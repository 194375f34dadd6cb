// One verdict: yes or no as a word, a symbol and a color, and the score on a line.
import { count, element, formatPair, nameOf, percent } from "./elements.js";

const MARGIN = 0.06; // at both ends of the scale
const BADGES = { yes: ["✓", "Yes"], no: ["✕", "No"], open: ["–", "No verdict"] };

export const kindOf = ({ match }) => (match === null ? "open" : match ? "yes" : "no");

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

// The threshold and what it promises, with enough digits to distinguish it from the score.
export function thresholdText(decided, score) {
  const { threshold, threshold_source: kind, recall, reason } = decided;
  if (reason) return reason;
  if (threshold === null) return "no threshold from validation: use a custom score";
  const promises = {
    guaranteed: `recall ${percent(recall)} guaranteed`,
    shrunk: `recall ${percent(recall)} estimated from similar classes`,
    pooled: "pooled over all classes",
    empirical: "not guaranteed",
    override: "set by the operator of the server",
    request: "custom",
  };
  return `threshold ${formatPair(score, threshold)[1]}, ${promises[kind]}`;
}

// What the threshold for a recall promises for this class, and how many validation samples reach
// it. Empty for a custom threshold.
export function validationText(decided) {
  const { threshold, threshold_source: kind, class_samples: samples, class_reached: reached } = decided;
  if (threshold === null || kind === "request" || kind === "override") return "";
  const known = `${promiseText(decided)} Expected precision ${precisionText(decided)}.`;
  if (reached === null) return `${known} The bundle was exported by an older version of kway.`;
  const others = `${count(decided.all_reached - reached, "sample")} of other classes`;
  const own = samples ? `${reached} of the ${count(samples, "validation sample")} of this class` : "This class has no validation samples;";
  return `${known} ${own}${samples ? " and" : ""} ${others} reach the threshold.`;
}

function promiseText({ threshold_source: kind, recall, confidence, pass_rate: rate, pass_rate_interval: interval, classes_below_recall: below }) {
  const share = percent(recall);
  if (kind === "guaranteed") return `At least ${share} of new samples of this class pass, with confidence ${percent(confidence)}.`;
  if (kind === "empirical") return `${share} of the validation samples of this class pass; for new samples, nothing is guaranteed.`;
  const estimate = interval === null ? "" : ` ${rate === null ? "Between" : `About ${rounded(rate)}, between`} ${rounded(interval[0])} and ${rounded(interval[1])} of new samples of this class pass (confidence ${percent(confidence)}).`;
  if (kind === "shrunk") return `Not guaranteed.${estimate}`;
  const missed = below === null ? "" : ` In ${rounded(below)} of the classes, fewer than ${share} of the validation samples pass.`;
  return `Not set for this class.${estimate}${missed}`;
}

function precisionText(decided) {
  const interval = decided.expected_precision_interval; // missing if no class was chosen
  const range = !interval ? "" : ` (${interval.map(rounded).join(" to ")})`;
  return decided.expected_precision === null ? "unknown" : `${rounded(decided.expected_precision)}${range}`;
}

const rounded = (share) => percent(Number(share.toFixed(3)));

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
  if (threshold === null || from === "request" || from === "override") return thresholdText(decided, score);
  return `${thresholdText(decided, score)} · expected precision ${precisionText(decided)}`;
}

// Set the ends of the scale that the lines in a container share, so that all scores and thresholds
// in `verdicts` fit, and return them. The style sheet computes the positions.
export function setScale(container, verdicts) {
  const values = verdicts.flatMap(({ score, threshold }) => [score, threshold ?? score]);
  if (!values.length) return null;
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const margin = MARGIN * (high - low) || 1;
  container.style.setProperty("--low", low - margin);
  container.style.setProperty("--high", high + margin);
  return [low, high];
}
