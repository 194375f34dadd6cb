// The token of this tab: requested when the server rejects a request, kept until the tab is closed.
import { byId } from "./elements.js";

const KEY = "kway-token";

export class Tokens {
  #asking = null;

  get current() {
    return sessionStorage.getItem(KEY);
  }

  // Resolves to a token other than `refused`, once there is one. All callers wait for the same
  // dialog.
  other(refused) {
    if (this.current !== refused) return Promise.resolve(this.current);
    this.#asking ??= this.#ask(refused !== null).finally(() => (this.#asking = null));
    return this.#asking;
  }

  #ask(wasWrong) {
    const [dialog, form, input] = ["token-dialog", "token-form", "token-input"].map(byId);
    byId("token-reason").textContent = wasWrong
      ? "The server does not know the last one, or no longer."
      : "Its owner has made one for you.";
    input.value = "";
    dialog.showModal();
    return new Promise((resolve) => {
      dialog.oncancel = (event) => event.preventDefault(); // without a token there is nothing to show
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
