// The page: one query at the top, applied in the tabs below.
import { Api } from "./api.js";
import { AskRoom } from "./ask.js";
import { Decision } from "./decision.js";
import { byId, element, nameOf } from "./elements.js";
import { onDropped } from "./files.js";
import { GalleryRoom } from "./gallery.js";
import { count } from "./numbers.js";
import { Picker } from "./picker.js";
import { Tabs } from "./tabs.js";
import { Tokens } from "./tokens.js";
import { WatchRoom } from "./watch.js";

async function start() {
  const tokens = new Tokens();
  const api = new Api(tokens);
  const model = await api.ask("GET", "v1/model");
  describe(model);
  const picker = new Picker(api, model.limits.max_classes);
  const decision = new Decision(model.recalls, model.loss.score);
  const rooms = {
    ask: new AskRoom(api, model),
    gallery: await GalleryRoom.open(api),
    watch: await WatchRoom.open(api, model),
  };
  const tabs = new Tabs(Object.keys(rooms).filter((name) => rooms[name]));
  const toAll = () => {
    const { fields, isComplete } = decision;
    const question = { classes: [...picker.chosen], fields, isComplete };
    for (const room of Object.values(rooms)) room?.setQuestion(question);
  };
  picker.addEventListener("change", toAll);
  decision.addEventListener("change", toAll);
  toAll();
  onDropped(
    (found) => roomFor(rooms, tabs).take(found),
    (text) => roomFor(rooms, tabs).takeText(text),
  );
  byId("question").hidden = false;
  byId("rooms").hidden = false;
  byId("class-input").focus();
}

// The tab that receives dropped input; the gallery accepts none.
function roomFor(rooms, tabs) {
  if (tabs.open === "gallery") tabs.show("ask");
  return rooms[tabs.open];
}

function describe({ bundle, num_classes: classes, reads, loss }) {
  document.title = `${bundle} · kway`;
  byId("served").replaceChildren(nameOf(bundle), ` · ${count(classes, "class", "classes")} · reads ${reads}`);
  byId("notice").hidden = loss.aligned;
  if (loss.aligned) return;
  byId("notice").replaceChildren(
    element("strong", {}, "Take these verdicts with care. "),
    `This model was trained with ${loss.kind}, which is not aligned with the Principle of Logit ` +
      "Separation: the logit of one class says little on its own.",
  );
}

start().catch((error) => {
  byId("served").textContent = "";
  byId("trouble").textContent = `The page could not start: ${error.message}. Reload it to try again.`;
  byId("trouble").hidden = false;
  throw error;
});
