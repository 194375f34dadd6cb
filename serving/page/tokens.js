// The token of this tab. The user is prompted for it when the server rejects a request; it is stored
// until the tab is closed.
import { byId } from "./elements.js";

const KEY = "kway-token";

export class Tokens {
  #prompt = null;

  get current() {
    return sessionStorage.getItem(KEY);
  }

  // Resolves to a new token after the server has rejected one. Concurrent callers share one dialog.
  replace(rejected) {
    if (this.current !== rejected) return Promise.resolve(this.current);
    this.#prompt ??= this.#openDialog(rejected !== null).finally(() => (this.#prompt = null));
    return this.#prompt;
  }

  #openDialog(wasRejected) {
    const [dialog, form, input] = ["token-dialog", "token-form", "token-input"].map(byId);
    byId("token-reason").textContent = wasRejected
      ? "The server rejected the last token. Enter a valid token."
      : "Ask the server’s administrator for a token.";
    input.value = "";
    dialog.showModal();
    return new Promise((resolve) => {
      dialog.oncancel = (event) => event.preventDefault(); // the page is empty without a token
      form.onsubmit = (event) => {
        event.preventDefault();
        const token = input.value.trim();
        if (!token) return;
        sessionStorage.setItem(KEY, token);
        input.value = "";
        dialog.close();
        resolve(token);
      };
    });
  }
}
