// Threshold selection: from a measured recall, a custom score, or none.
import { byId, element } from "./elements.js";
import { percent } from "./numbers.js";

const DEBOUNCE_MILLISECONDS = 250;

export class Decision extends EventTarget {
  #isLogit;
  #hasRecalls;
  #number = element("input", {
    type: "number", step: "any", inputmode: "decimal", "aria-label": "Score threshold",
  });
  #timer = 0;
  #lastFields = "";

  // For a model with thresholds for `recalls`. `score` is the kind of score that its loss defines.
  constructor(recalls, score) {
    super();
    this.#isLogit = score === "logit";
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
    // This event also fires for the number field, so clicking a button after typing a number applies
    // the number first.
    fieldset.addEventListener("change", () => this.#changed());
    this.#number.addEventListener("input", () => {
      fieldset.querySelector('[value="threshold"]').checked = true;
      clearTimeout(this.#timer);
      this.#timer = setTimeout(() => this.#changed(), DEBOUNCE_MILLISECONDS);
    });
    this.#explain();
  }

  // The fields of a request: { recall }, { threshold } or {}.
  get fields() {
    const chosen = document.querySelector('[name="decision"]:checked').value;
    if (chosen.startsWith("recall:")) return { recall: Number(chosen.slice(7)) };
    return chosen === "threshold" ? { threshold: this.#threshold } : {};
  }

  get isComplete() {
    return !("threshold" in this.fields) || this.#threshold !== null;
  }

  get #threshold() {
    return Number.isFinite(this.#number.valueAsNumber) ? this.#number.valueAsNumber : null;
  }

  #changed() {
    clearTimeout(this.#timer);
    const fields = JSON.stringify(this.fields);
    if (fields === this.#lastFields) return;
    this.#lastFields = fields;
    this.#explain();
    this.dispatchEvent(new Event("change"));
  }

  #explain() {
    const { recall, threshold } = this.fields;
    const score = this.#isLogit ? "score (logit)" : "score (computed from the logit by the model’s loss)";
    let meaning = `Shows the ${score} of each class, without a verdict.`;
    if (!this.#hasRecalls) meaning += " This model has no thresholds for a recall.";
    if (recall !== undefined) {
      // Short enough for one line in a wide window: if the text wrapped, the tabs would move just
      // as a user clicks them.
      meaning = `Yes at or above the ${percent(recall)} recall threshold of the class, which is guaranteed, estimated or pooled: see below the verdict.`;
    } else if (threshold !== undefined) {
      meaning = threshold === null ? "Enter the minimum score for a yes." : `Yes if the ${score} is at least ${threshold}.`;
    }
    byId("decision-meaning").textContent = meaning;
  }
}
