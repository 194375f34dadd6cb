// The "Live watch" tab: standing queries, frames, and hits.
import { isAway, Refused } from "./api.js";
import { Camera } from "./camera.js";
import { byId, element, nameOf } from "./elements.js";
import { Feed } from "./feed.js";
import { chooser } from "./files.js";
import { Hits } from "./hits.js";
import { Listener } from "./listener.js";
import { count, percent } from "./numbers.js";
import { precisionOf } from "./verdict.js";

const HOUR = 3600;
const FEED_NAME = /^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$/;

export class WatchRoom {
  #api;
  #reads;
  #mostBytes;
  #question = { classes: [], fields: {}, isComplete: true };
  #listeners = new Map();
  #camera = null;
  #feed = null;
  #counts = { frames: 0, hits: 0 };
  #hits = new Hits();
  #list = element("ul", { class: "watches", "aria-label": "Your watches" });
  #status = element("p", { class: "quiet", role: "status" });
  #feedStatus = element("p", { class: "quiet small", role: "status" });
  #make = element("button", { type: "button", class: "button", onclick: () => this.#create() }, "Watch for these classes");
  #feedName = element("input", { id: "feed-name", type: "text", value: "browser", autocomplete: "off", spellcheck: "false" });
  #video = element("video", { muted: true, playsinline: true, hidden: true, "aria-label": "What the camera sees" });
  #cameraButton = element("button", { type: "button", class: "button", onclick: () => this.#toggleCamera() }, "Use the camera");

  // Null if the server has no watches.
  static async open(api, model) {
    try {
      const { watches } = await api.ask("GET", "v1/watches");
      return new WatchRoom(api, model, watches);
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      if (error.status !== 409) return null;
      const room = new WatchRoom(api, model, []); // one of the watches was created for another model
      room.#status.textContent = error.message;
      return room;
    }
  }

  constructor(api, model, watches) {
    [this.#api, this.#reads, this.#mostBytes] = [api, model.reads, model.limits.max_frame_bytes];
    byId("room-watch").append(
      element("section", { class: "step" }, element("h2", {}, "Watches"), this.#status,
        element("p", { class: "bar" }, this.#make), this.#list),
      element("section", { class: "step" }, element("h2", {}, "Frames from this page"), ...this.#feeding()),
      element("section", { class: "step" }, element("h2", {}, "Hits"),
        element("p", { class: "quiet small", id: "no-hits" }, "None yet. Hits of the watches above appear here, whoever sends the frames."),
        this.#hits.element),
    );
    watches.forEach((one) => this.#add(one));
    this.#explain();
  }

  setQuestion(question) {
    this.#question = question;
    this.#explain();
  }

  take(found) {
    if (this.#reads !== "images") return;
    for (const one of found) this.#send(one);
  }

  takeText(text) {
    if (this.#reads !== "texts") return;
    for (const line of text.split(/\r\n|\r|\n/)) if (line.trim()) this.#send({ name: "", content: line });
  }

  #feeding() {
    const name = element("p", { class: "bar" }, element("label", { for: "feed-name" }, "Name of the feed"), this.#feedName);
    this.#feedName.addEventListener("change", () => this.#closeFeed());
    if (this.#reads === "images") {
      const files = chooser("choose files", (found) => this.take(found));
      const drop = element("p", { class: "drop" }, element("strong", {}, "Drop images here"), ", paste them, or ", files);
      return [name, drop, element("p", { class: "bar" }, this.#cameraButton, this.#feedStatus), this.#video];
    }
    const input = element("input", { id: "feed-text", type: "text", dir: "auto" });
    const form = element("form", {
      class: "bar",
      onsubmit: (event) => {
        event.preventDefault();
        this.takeText(input.value);
        input.value = "";
      },
    }, element("label", { for: "feed-text" }, "Text"), input, element("button", { class: "button" }, "Send"));
    return [name, form, this.#feedStatus];
  }

  #explain() {
    const { classes, fields, isComplete } = this.#question;
    const decides = isComplete && Object.keys(fields).length > 0;
    this.#make.disabled = !classes.length || !decides;
    this.#status.textContent = !classes.length
      ? "Choose a class above, then watch for it: every frame of any feed is asked."
      : decides ? "A watch lives for an hour; renew it to keep it." : "A watch has to decide: choose a recall or a score above.";
  }

  async #create() {
    const { classes, fields } = this.#question;
    const body = { classes: classes.map(({ id }) => id), ...fields, ttl_seconds: HOUR };
    await this.#tried(async () => {
      try {
        this.#listen(this.#add(await this.#api.ask("POST", "v1/watches", { body, once: true })));
      } catch (error) {
        if (error instanceof Refused && isAway(error)) await this.#readAgain();
        throw error;
      }
    });
  }

  // If there was no response, a watch may have been created nevertheless. The list then contains
  // it.
  async #readAgain() {
    const { watches } = await this.#api.ask("GET", "v1/watches");
    for (const one of watches) if (!this.#list.querySelector(`[data-watch="${CSS.escape(one.id)}"]`)) this.#add(one);
  }

  async #tried(work) {
    try {
      await work();
    } catch (error) {
      this.#status.textContent = error.message;
    }
  }

  #add(watch) {
    const names = watch.classes.flatMap((one, place) => [place ? ", " : "", nameOf(one.class)]);
    const decided = watch.recall === null
      ? `a score of ${watch.threshold}`
      : `recall ${percent(watch.recall)} · expected precision ${precisionOf(watch.classes)}`;
    const state = element("span", { class: "quiet small", role: "status" });
    const until = element("span", {}, untilWords(watch));
    const listen = element("button", { type: "button", class: "plain", "aria-pressed": "false", onclick: () => this.#toggle(row) }, "Listen");
    const renew = element("button", { type: "button", class: "plain", onclick: () => this.#renew(row) }, "Renew");
    const remove = element("button", { type: "button", class: "plain", onclick: () => this.#remove(row) }, "Delete");
    const line = element("li", { class: "watch", "data-watch": watch.id },
      element("div", { class: "about" },
        element("strong", {}, ...names),
        element("span", { class: "quiet small" }, `by ${decided} · ${watch.feeds.length ? `feeds ${watch.feeds.join(", ")}` : "all feeds"} · `, until), state),
      element("div", { class: "bar" }, listen, renew, remove));
    const row = { watch, line, state, listen, until };
    this.#list.append(line);
    return row;
  }

  #toggle(row) {
    if (this.#listeners.has(row.watch.id)) this.#deafen(row, "");
    else this.#listen(row);
  }

  #listen(row) {
    const listener = new Listener(this.#api.tokens, row.watch.id, {
      hit: (said) => this.#feed?.isOwn(said) || this.#hit(said),
      dropped: (number) => (row.state.textContent = `listening; ${count(number, "hit")} came too fast to keep`),
      state: (words, isOver) => (isOver ? this.#deafen(row, words) : (row.state.textContent = words)),
    });
    this.#listeners.set(row.watch.id, listener);
    row.listen.textContent = "Stop listening";
    row.listen.setAttribute("aria-pressed", "true");
  }

  #deafen(row, words) {
    this.#listeners.get(row.watch.id)?.stop();
    this.#listeners.delete(row.watch.id);
    row.state.textContent = words;
    row.listen.textContent = "Listen";
    row.listen.setAttribute("aria-pressed", "false");
  }

  #renew(row) {
    return this.#tried(async () => {
      row.watch = await this.#api.ask("PATCH", `v1/watches/${row.watch.id}`, { body: {} });
      row.until.textContent = untilWords(row.watch);
    });
  }

  #remove(row) {
    return this.#tried(async () => {
      try {
        await this.#api.fetch("DELETE", `v1/watches/${row.watch.id}`);
      } catch (error) {
        if (error.status !== 404) throw error; // 404: it has already expired
      }
      this.#deafen(row, "");
      row.line.remove();
      this.#make.focus();
    });
  }

  #send(found) {
    const name = this.#feedName.value.trim();
    if (!FEED_NAME.test(name)) {
      this.#feedStatus.textContent = "Name the feed by letters, digits and . _ -, at most 64.";
      this.#feedName.focus();
      return;
    }
    this.#feed ??= new Feed(this.#api.tokens, name, this.#mostBytes, {
      hit: (said, frame) => this.#hit(said, frame),
      refused: (frame, message) => this.#countFrame(`${frame.name || "a frame"}: ${message}`),
      answered: () => this.#countFrame(""),
      ended: (message) => this.#fail(message),
    });
    this.#feed.send(found);
  }

  #hit(said, frame) {
    this.#counts.hits += 1;
    byId("no-hits").hidden = true;
    this.#hits.add(said, frame);
  }

  #countFrame(trouble) {
    this.#counts.frames += 1;
    const { frames, hits } = this.#counts;
    const told = trouble ? ` · ${trouble}` : "";
    this.#feedStatus.textContent = `${count(frames, "frame")} answered, ${count(hits, "hit")}${told}`;
  }

  #fail(message) {
    this.#stopCamera();
    this.#feedStatus.textContent = `The feed has ended: ${message}`;
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
      const isReady = () => (this.#feed?.numOpen ?? 0) === 0;
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

function untilWords({ expires_at: at }) {
  const end = new Date(at);
  const isToday = end.toDateString() === new Date().toDateString();
  return `until ${isToday ? end.toLocaleTimeString() : end.toLocaleString()}`;
}
