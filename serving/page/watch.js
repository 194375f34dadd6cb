// The "Live watch" tab: the watches, the frames that this page sends, and the hits.
import { isOutcomeUnknown, RejectedError } from "./api.js";
import { Camera } from "./camera.js";
import { byId, element, nameOf } from "./elements.js";
import { Feed } from "./feed.js";
import { chooser } from "./files.js";
import { Hits } from "./hits.js";
import { Listener } from "./listener.js";
import { count, percent } from "./numbers.js";
import { kindsOf, precisionOf } from "./verdict.js";

const HOUR = 3600;
const FEED_NAME = /^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$/;

export class WatchPanel {
  #api;
  #reads;
  #maxBytes;
  #query = { classes: [], fields: {}, isComplete: true };
  #listeners = new Map();
  #camera = null;
  #feed = null;
  #counts = { frames: 0, hits: 0 };
  #hits = new Hits();
  #list = element("ul", { class: "watches", "aria-label": "Your watches" });
  #status = element("p", { class: "quiet", role: "status" });
  #feedStatus = element("p", { class: "quiet small", role: "status" });
  #createButton = element("button", { type: "button", class: "button", onclick: () => this.#create() }, "Watch for these classes");
  #feedName = element("input", { id: "feed-name", type: "text", value: "browser", autocomplete: "off", spellcheck: "false" });
  #video = element("video", { muted: true, playsinline: true, hidden: true, "aria-label": "Camera preview" });
  #cameraButton = element("button", { type: "button", class: "button", onclick: () => this.#toggleCamera() }, "Use the camera");

  // Null if the server does not offer watches.
  static async open(api, model) {
    try {
      const { watches } = await api.requestJson("GET", "v1/watches");
      return new WatchPanel(api, model, watches);
    } catch (error) {
      if (!(error instanceof RejectedError)) throw error;
      if (error.status !== 409) return null;
      const panel = new WatchPanel(api, model, []); // one of the watches was created for another model
      panel.#status.textContent = error.message;
      return panel;
    }
  }

  constructor(api, model, watches) {
    [this.#api, this.#reads, this.#maxBytes] = [api, model.reads, model.limits.max_frame_bytes];
    byId("panel-watch").append(
      element("section", { class: "step" }, element("h2", {}, "Watches"), this.#status,
        element("p", { class: "bar" }, this.#createButton), this.#list),
      element("section", { class: "step" }, element("h2", {}, "Frames from this page"), ...this.#feedControls()),
      element("section", { class: "step" }, element("h2", {}, "Hits"),
        element("p", { class: "quiet small", id: "no-hits" }, "No hits yet. Hits appear here regardless of who sends the frames."),
        this.#hits.element),
    );
    watches.forEach((one) => this.#add(one));
    this.#explain();
  }

  setQuery(query) {
    this.#query = query;
    this.#explain();
  }

  addFiles(files) {
    if (this.#reads !== "images") return;
    for (const one of files) this.#send(one);
  }

  addText(text) {
    if (this.#reads !== "texts") return;
    for (const line of text.split(/\r\n|\r|\n/)) if (line.trim()) this.#send({ name: "", content: line });
  }

  #feedControls() {
    const name = element("p", { class: "bar" }, element("label", { for: "feed-name" }, "Feed name"), this.#feedName);
    this.#feedName.addEventListener("change", () => this.#closeFeed());
    if (this.#reads === "images") {
      const files = chooser("choose files", (chosen) => this.addFiles(chosen));
      const drop = element("p", { class: "drop" }, element("strong", {}, "Drop images here"), ", paste them, or ", files);
      return [name, drop, element("p", { class: "bar" }, this.#cameraButton, this.#feedStatus), this.#video];
    }
    const input = element("input", { id: "feed-text", type: "text", dir: "auto" });
    const form = element("form", {
      class: "bar",
      onsubmit: (event) => {
        event.preventDefault();
        this.addText(input.value);
        input.value = "";
      },
    }, element("label", { for: "feed-text" }, "Text"), input, element("button", { class: "button" }, "Send"));
    return [name, form, this.#feedStatus];
  }

  #explain() {
    const { classes, fields, isComplete } = this.#query;
    const decides = isComplete && Object.keys(fields).length > 0;
    this.#createButton.disabled = !classes.length || !decides;
    this.#status.textContent = !classes.length
      ? "Choose a class above, then create a watch. It checks every frame of every feed."
      : decides ? "A watch expires after one hour unless you renew it." : "A watch requires a threshold: choose a recall or a custom score above.";
  }

  async #create() {
    const { classes, fields } = this.#query;
    const body = { classes: classes.map(({ id }) => id), ...fields, ttl_seconds: HOUR };
    await this.#withErrorStatus(async () => {
      try {
        this.#listen(this.#add(await this.#api.requestJson("POST", "v1/watches", { body, once: true })));
      } catch (error) {
        if (error instanceof RejectedError && isOutcomeUnknown(error)) await this.#reload();
        throw error;
      }
    });
  }

  // Add the watches that are not in the list yet. If there was no response, the watch may still
  // have been created.
  async #reload() {
    const { watches } = await this.#api.requestJson("GET", "v1/watches");
    for (const one of watches) if (!this.#list.querySelector(`[data-watch="${CSS.escape(one.id)}"]`)) this.#add(one);
  }

  async #withErrorStatus(work) {
    try {
      await work();
    } catch (error) {
      this.#status.textContent = error.message;
    }
  }

  #add(watch) {
    const names = watch.classes.flatMap((one, index) => [index ? ", " : "", nameOf(one.class)]);
    const decision = watch.recall === null
      ? `threshold ${watch.threshold}`
      : `recall ${percent(watch.recall)} (${kindsOf(watch.classes)}) · expected precision ${precisionOf(watch.classes)}`;
    const hasDrifted = watch.drift.some((one) => one.has_drifted);
    const drift = hasDrifted ? " · the share of matching frames has changed" : "";
    const state = element("span", { class: "quiet small", role: "status" });
    const expires = element("span", {}, expiryText(watch));
    const listen = element("button", { type: "button", class: "plain", "aria-pressed": "false", onclick: () => this.#toggle(row) }, "Listen");
    const renew = element("button", { type: "button", class: "plain", onclick: () => this.#renew(row) }, "Renew");
    const remove = element("button", { type: "button", class: "plain", onclick: () => this.#remove(row) }, "Delete");
    const line = element("li", { class: "watch", "data-watch": watch.id },
      element("div", { class: "about" },
        element("strong", {}, ...names),
        element("span", { class: "quiet small" }, `${decision}${drift} · ${watch.feeds.length ? `feeds ${watch.feeds.join(", ")}` : "all feeds"} · `, expires), state),
      element("div", { class: "bar" }, listen, renew, remove));
    const row = { watch, line, state, listen, expires };
    this.#list.append(line);
    return row;
  }

  #toggle(row) {
    if (this.#listeners.has(row.watch.id)) this.#stopListening(row, "");
    else this.#listen(row);
  }

  #listen(row) {
    const listener = new Listener(this.#api.tokens, row.watch.id, {
      hit: (hit) => this.#feed?.isOwn(hit) || this.#addHit(hit),
      dropped: (number) => (row.state.textContent = `listening; ${count(number, "hit")} dropped because newer ones exceeded the limit of stored hits`),
      state: (text, isOver) => (isOver ? this.#stopListening(row, text) : (row.state.textContent = text)),
    });
    this.#listeners.set(row.watch.id, listener);
    row.listen.textContent = "Stop listening";
    row.listen.setAttribute("aria-pressed", "true");
  }

  #stopListening(row, text) {
    this.#listeners.get(row.watch.id)?.stop();
    this.#listeners.delete(row.watch.id);
    row.state.textContent = text;
    row.listen.textContent = "Listen";
    row.listen.setAttribute("aria-pressed", "false");
  }

  #renew(row) {
    return this.#withErrorStatus(async () => {
      row.watch = await this.#api.requestJson("PATCH", `v1/watches/${row.watch.id}`, { body: {} });
      row.expires.textContent = expiryText(row.watch);
    });
  }

  #remove(row) {
    return this.#withErrorStatus(async () => {
      try {
        await this.#api.request("DELETE", `v1/watches/${row.watch.id}`);
      } catch (error) {
        if (error.status !== 404) throw error; // 404: it has already expired
      }
      this.#stopListening(row, "");
      row.line.remove();
      this.#createButton.focus();
    });
  }

  #send(input) {
    const name = this.#feedName.value.trim();
    if (!FEED_NAME.test(name)) {
      this.#feedStatus.textContent = "A feed name consists of at most 64 letters, digits, dots, hyphens and underscores. It must begin with a letter or digit.";
      this.#feedName.focus();
      return;
    }
    this.#feed ??= new Feed(this.#api.tokens, name, this.#maxBytes, {
      hit: (hit, frame) => this.#addHit(hit, frame),
      rejected: (frame, message) => this.#countFrame(`${frame.name || "frame"}: ${message}`),
      processed: () => this.#countFrame(""),
      closed: (message) => this.#fail(message),
    });
    this.#feed.send(input);
  }

  #addHit(hit, frame) {
    this.#counts.hits += 1;
    byId("no-hits").hidden = true;
    this.#hits.add(hit, frame);
  }

  #countFrame(error) {
    this.#counts.frames += 1;
    const { frames, hits } = this.#counts;
    const suffix = error ? ` · ${error}` : "";
    this.#feedStatus.textContent = `${count(frames, "frame")} processed, ${count(hits, "hit")}${suffix}`;
  }

  #fail(message) {
    this.#stopCamera();
    this.#feedStatus.textContent = `The feed was closed: ${message}`;
  }

  async #toggleCamera() {
    if (this.#camera) {
      this.#stopCamera();
      return;
    }
    const camera = new Camera();
    this.#camera = camera;
    this.#cameraButton.textContent = "Stop the camera";
    this.#video.hidden = false;
    try {
      const isReady = () => (this.#feed?.numPending ?? 0) === 0;
      await camera.start(this.#video, isReady, (blob) => this.#send({ name: "", content: blob }));
    } catch (error) {
      this.#stopCamera();
      this.#feedStatus.textContent = error.message;
    }
  }

  #stopCamera() {
    this.#camera?.stop();
    this.#camera = null;
    this.#cameraButton.textContent = "Use the camera";
    this.#video.hidden = true;
  }

  #closeFeed() {
    this.#feed?.close();
    this.#feed = null;
  }
}

function expiryText({ expires_at: time }) {
  const expiry = new Date(time);
  const isToday = expiry.toDateString() === new Date().toDateString();
  return `expires ${isToday ? expiry.toLocaleTimeString() : expiry.toLocaleString()}`;
}
