// The "Ask" tab: images or texts, each with its verdicts.
import { Asking } from "./asking.js";
import { Cards } from "./cards.js";
import { byId, element, nameOf } from "./elements.js";
import { chooser } from "./files.js";
import { bytes, count } from "./numbers.js";
import { setScale } from "./scale.js";
import { shownInValidation, source } from "./verdict.js";

export class AskRoom {
  #asking;
  #cards;
  #question = { classes: [], fields: {}, isComplete: true };
  #isDrawing = false;

  constructor(api, model) {
    this.reads = model.reads;
    this.#asking = new Asking(api, model.limits);
    this.#asking.addEventListener("change", () => this.#soon());
    this.#cards = new Cards(byId("cards"), {
      remove: (input) => this.#asking.remove(input),
      tryAgain: (input) => this.#asking.tryAgain(input),
    });
    byId("clear").addEventListener("click", () => this.#clear());
    if (model.reads === "texts") this.#readTexts(model.limits);
    else this.#readImages(model.limits);
  }

  setQuestion(question) {
    this.#question = question;
    this.#asking.ask(question.classes, question.isComplete ? question.fields : null);
  }

  take(found) {
    if (this.reads === "images") this.#asking.add(found);
    else for (const { content } of found) content.text().then((text) => this.takeText(text));
  }

  takeText(text) {
    if (this.reads !== "texts") return;
    const lines = text.split(/\r\n|\r|\n/).filter((line) => line.trim());
    this.#asking.add(lines.map((content) => ({ name: content.slice(0, 60), content })));
  }

  #readImages(limits) {
    byId("images").hidden = false;
    byId("choose").append(chooser("choose files", (found) => this.#asking.add(found)));
    byId("images-limits").textContent =
      `JPEG, PNG, WebP, BMP or GIF, up to ${bytes(limits.max_body_bytes)} and ` +
      `${Math.floor(limits.max_pixels / 1e6)} megapixels each.`;
  }

  #readTexts(limits) {
    const [form, input] = [byId("texts"), byId("text-input")];
    form.hidden = false;
    byId("texts-limits").textContent = `Up to ${count(limits.max_text_chars, "character")} each.`;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.takeText(input.value);
      input.value = "";
      input.focus();
    });
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
    });
  }

  #clear() {
    this.#asking.clear();
    (this.reads === "texts" ? byId("text-input") : byId("choose").querySelector("button")).focus();
  }

  // Draw at most once per animation frame, however much has changed.
  #soon() {
    if (this.#isDrawing) return;
    this.#isDrawing = true;
    requestAnimationFrame(() => {
      this.#isDrawing = false;
      this.#draw();
    });
  }

  #draw() {
    const { classes, fields, isComplete } = this.#question;
    const decides = Object.keys(fields).length > 0;
    const inputs = this.#asking.inputs;
    const verdictsOf = (input) => this.#asking.verdictsOf(input);
    byId("answers").hidden = inputs.length === 0;
    this.#cards.show(inputs, {
      verdictsOf,
      decides,
      isAsking: classes.length > 0 && isComplete,
    });
    const verdicts = inputs.map((input) => (input.fault || input.failure ? null : verdictsOf(input)));
    const ends = setScale(byId("cards"), verdicts.flatMap((one) => one ?? []));
    this.#explainLine(ends, decides);
    this.#explainThresholds(verdicts.find(Boolean) ?? []);
    this.#sumUp(inputs, verdicts, decides);
  }

  #explainLine(ends, decides) {
    byId("legend").hidden = ends === null;
    if (ends === null) return;
    const [low, high] = ends.map((end) => end.toFixed(1));
    const dot = element("span", { class: "dot", "aria-hidden": "true" });
    const bar = element("span", { class: "threshold", "aria-hidden": "true" });
    const threshold = decides ? [" ", bar, " its threshold"] : [];
    byId("legend").replaceChildren(dot, " score", ...threshold, ` · each line from ${low} to ${high}`);
  }

  // A line per class: which validation samples set its threshold, and how many reach it.
  #explainThresholds(verdicts) {
    const lines = verdicts.map(({ class: name, decided }) => {
      const shown = decided ? shownInValidation(decided) : "";
      return shown ? element("li", {}, nameOf(name), `: ${source(decided, decided.threshold)}. ${shown}`) : null;
    });
    byId("thresholds").replaceChildren(...lines.filter(Boolean));
  }

  #sumUp(inputs, verdicts, decides) {
    const { classes } = this.#question;
    const done = verdicts.filter(Boolean);
    const parts = [];
    if (decides && done.length) {
      for (const [place, { name }] of classes.entries()) {
        const yes = done.filter((one) => one[place].match).length;
        parts.push(`${classes.length > 1 ? `${name}: yes` : "Yes"} for ${yes} of ${done.length}`);
      }
    } else if (done.length) {
      parts.push(`${done.length} scored`);
    }
    const refused = inputs.filter((one) => one.fault || one.failure).length;
    if (refused) parts.push(`${refused} not answered`);
    const open = inputs.length - refused - done.length;
    if (open) parts.push(classes.length ? `${open} to go` : `${count(open, this.reads.slice(0, -1))}: choose a class`);
    const text = parts.join(" · ");
    if (byId("summary").textContent !== text) byId("summary").textContent = text;
  }
}
