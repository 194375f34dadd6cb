// Threshold selection: from a measured recall, a custom score, or none.
import { byId, element, percent } from "./elements.js";

const DEBOUNCE_MILLISECONDS = 250;

export class Decision extends EventTarget {
  #score;
  #hasRecalls;
  #number = element("input", {
    type: "number", step: "any", inputmode: "decimal", "aria-label": "Score threshold",
  });
  #timer = 0;

  // For a model with thresholds for `recalls`. `score` is the kind of score that its loss defines.
  constructor(recalls, score) {
    super();
    this.#score = score === "logit" ? "score (logit)" : "score (computed from the logit by the model’s loss)";
    this.#hasRecalls = recalls.length > 0;
    const choices = recalls.map((recall) => [`recall:${recall}`, `recall ${percent(recall)}`]);
    choices.push(["threshold", "custom score"], ["none", "none: show scores only"]);
    const fieldset = byId("decision");
    for (const [value, label] of choices) {
      const radio = element("input", { type: "radio", name: "decision", value });
      const number = value === "threshold" ? this.#number : null;
      fieldset.append(element("span", { class: "choice" }, element("label", {}, radio, label), number));
    }
    // Without thresholds, a new user sees scores first: a custom score requires a number.
    fieldset.querySelector(`[value="${this.#hasRecalls ? choices[0][0] : "none"}"]`).checked = true;
    fieldset.addEventListener("input", ({ target }) => {
      if (target === this.#number) fieldset.querySelector('[value="threshold"]').checked = true;
      clearTimeout(this.#timer);
      this.#timer = setTimeout(() => this.#changed(), target === this.#number ? DEBOUNCE_MILLISECONDS : 0);
    });
    this.#explain();
  }

  // The fields of a request: { recall }, { threshold } or {}.
  get fields() {
    const chosen = document.querySelector('[name="decision"]:checked').value;
    if (chosen.startsWith("recall:")) return { recall: Number(chosen.slice(7)) };
    if (chosen === "none") return {};
    return { threshold: Number.isFinite(this.#number.valueAsNumber) ? this.#number.valueAsNumber : null };
  }

  get isComplete() {
    return this.fields.threshold !== null;
  }

  #changed() {
    this.#explain();
    this.dispatchEvent(new Event("change"));
  }

  #explain() {
    const { recall, threshold } = this.fields;
    let meaning = `Shows the ${this.#score} of each class, without a verdict.`;
    if (!this.#hasRecalls) meaning += " This model has no thresholds for a recall.";
    if (recall !== undefined) {
      // Short enough for one line in a wide window: if the text wrapped, the tabs would move just
      // as a user clicks them.
      meaning = `Yes at or above the ${percent(recall)} recall threshold of the class, which is guaranteed, estimated or pooled: see below the verdict.`;
    } else if (threshold !== undefined) {
      meaning = threshold === null ? "Enter the minimum score for a yes." : `Yes if the ${this.#score} is at least ${threshold}.`;
    }
    byId("decision-meaning").textContent = meaning;
  }
}
