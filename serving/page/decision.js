// How to decide between yes and no: by a measured recall, by a score, or not at all.
import { byId, element } from "./elements.js";
import { percent } from "./numbers.js";

const DEBOUNCE_MILLISECONDS = 250;

export class Decision extends EventTarget {
  #isLogit;
  #number = element("input", {
    type: "number", step: "any", inputmode: "decimal", "aria-label": "Score that decides",
  });
  #timer = 0;
  #told = "";

  // For a model with thresholds for `recalls` and with scores of the kind that its loss defines.
  constructor(recalls, score) {
    super();
    this.#isLogit = score === "logit";
    const choices = recalls.map((recall) => [`recall:${recall}`, `recall ${percent(recall)}`]);
    choices.push(["threshold", "a score of"], ["none", "nothing: show scores"]);
    const fieldset = byId("decision");
    for (const [value, label] of choices) {
      const radio = element("input", { type: "radio", name: "decision", value });
      const number = value === "threshold" ? this.#number : null;
      fieldset.append(element("span", { class: "choice" }, element("label", {}, radio, label), number));
    }
    fieldset.elements[0].checked = true;
    // Also fires for the number field: leaving the field for a button applies the number at once.
    fieldset.addEventListener("change", () => this.#changed());
    this.#number.addEventListener("input", () => {
      fieldset.querySelector('[value="threshold"]').checked = true;
      clearTimeout(this.#timer);
      this.#timer = setTimeout(() => this.#changed(), DEBOUNCE_MILLISECONDS);
    });
    this.#explain();
  }

  // As fields of a request: { recall }, { threshold } or {}.
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
    const now = JSON.stringify(this.fields);
    if (now === this.#told) return;
    this.#told = now;
    this.#explain();
    this.dispatchEvent(new Event("change"));
  }

  #explain() {
    const { recall, threshold } = this.fields;
    const what = this.#isLogit ? "the logit" : "what the model’s loss makes of its logit";
    let meaning = `Every score is shown, ${what} of the class, and nothing is decided.`;
    if (recall !== undefined) {
      // Fits on one line in a wide window: wrapping text would move the tabs while they are
      // clicked.
      meaning = `Yes at or above the threshold for recall ${percent(recall)}: the class’s own or, with few validation samples, one pooled over all classes.`;
    } else if (threshold !== undefined) {
      meaning = threshold === null ? "Type the score from which on the answer is yes." : `Yes from a score of ${threshold} on; it is ${what} of the class.`;
    }
    byId("decision-meaning").textContent = meaning;
  }
}
