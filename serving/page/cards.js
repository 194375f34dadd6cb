// The answers as a list of cards: the image or text, followed by a line per class.
import { element, nameOf } from "./elements.js";
import { kindOf, verdictRow } from "./verdict.js";

export class Cards {
  #list;
  #cards = new Map();
  #actions;

  // `actions`: handlers for `remove` and `tryAgain` of an input.
  constructor(list, actions) {
    this.#list = list;
    this.#actions = actions;
  }

  // `verdictsOf` an input: a list, or null while unknown. Redraws only what has changed.
  show(inputs, { verdictsOf, decides, isAsking }) {
    for (const [input, card] of this.#cards) if (!inputs.includes(input)) this.#drop(input, card);
    for (const input of inputs) {
      if (!this.#cards.has(input)) this.#cards.set(input, this.#card(input));
      const card = this.#cards.get(input);
      const verdicts = verdictsOf(input);
      const looks = JSON.stringify([input.fault, input.failure, verdicts, decides, isAsking]);
      if (looks === card.looks) continue;
      card.looks = looks;
      const kind = overall(input, verdicts);
      card.element.className = `card ${kind}`;
      card.element.setAttribute("aria-busy", String(kind === "pending" && isAsking));
      // Keep showing the old verdicts, dimmed, until new ones arrive, so that the layout does not
      // jump.
      if (kind === "pending" && isAsking && card.body.querySelector(".verdict")) continue;
      card.body.replaceChildren(this.#said(input, verdicts, { decides, isAsking }));
    }
  }

  #card(input) {
    const isText = typeof input.content === "string";
    const url = isText || input.fault ? null : URL.createObjectURL(input.content);
    const remove = element("button", {
      type: "button", class: "remove", "aria-label": `Remove ${input.name}`,
      onclick: () => this.#remove(input),
    }, "×");
    const shown = isText
      ? element("p", { class: "text", dir: "auto" }, input.content)
      : thumbnail(url);
    const body = element("div", { class: "said" });
    const title = isText ? null : element("p", { class: "file" }, nameOf(input.name, { title: input.name }));
    const made = element("li", {}, shown, element("div", { class: "about" }, title, body), remove);
    this.#list.append(made);
    return { element: made, body, remove, url, looks: "" };
  }

  #said(input, verdicts, { decides, isAsking }) {
    if (input.fault) return problem(input.fault);
    if (input.failure) {
      const again = element("button", { type: "button", class: "plain", onclick: () => this.#actions.tryAgain(input) }, "Try again");
      return problem(input.failure, again);
    }
    if (verdicts) {
      const rows = verdicts.map((one) => verdictRow(one, decides));
      return element("ul", { class: "verdicts" }, ...rows);
    }
    const what = isAsking ? "asking …" : "waits for a question: choose a class above";
    return element("p", { class: "quiet small" }, what);
  }

  // Move the focus to the next card's button, so that keyboard users stay in the list.
  #remove(input) {
    const { element: made } = this.#cards.get(input);
    const next = made.nextElementSibling ?? made.previousElementSibling;
    this.#actions.remove(input);
    next?.querySelector(".remove").focus();
  }

  #drop(input, card) {
    if (card.url) URL.revokeObjectURL(card.url);
    card.element.remove();
    this.#cards.delete(input);
  }
}

function problem(message, ...more) {
  const sign = element("span", { class: "badge trouble-sign" }, element("span", { "aria-hidden": "true" }, "!"), " Not answered");
  return element("p", { class: "problem" }, sign, " ", element("span", {}, message), " ", ...more);
}

function thumbnail(url) {
  const frame = element("span", { class: "thumbnail" });
  if (url === null) return frame;
  // The name is shown in addition. A file that the browser cannot display may still be valid input.
  const image = element("img", { src: url, alt: "", loading: "lazy", decoding: "async" });
  image.addEventListener("error", () => image.remove());
  frame.append(image);
  return frame;
}

function overall(input, verdicts) {
  if (input.fault || input.failure) return "wrong";
  if (!verdicts) return "pending";
  return verdicts.some((one) => kindOf(one) === "yes") ? "yes" : "no";
}
