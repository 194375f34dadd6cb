// The page: one query at the top, which applies to the tabs below.
import { Api } from "./api.js";
import { Decision } from "./decision.js";
import { byId, element, nameOf } from "./elements.js";
import { onDropped } from "./files.js";
import { GalleryPanel } from "./gallery.js";
import { count } from "./numbers.js";
import { Picker } from "./picker.js";
import { QueryPanel } from "./query.js";
import { Tabs } from "./tabs.js";
import { Tokens } from "./tokens.js";

async function start() {
  const tokens = new Tokens();
  const api = new Api(tokens);
  const model = await api.requestJson("GET", "v1/model");
  describe(model);
  const picker = new Picker(api, model.limits.max_classes);
  const decision = new Decision(model.recalls, model.loss.score);
  const panels = {
    query: new QueryPanel(api, model),
    gallery: await GalleryPanel.open(api),
  };
  const tabs = new Tabs(Object.keys(panels).filter((name) => panels[name]));
  const updatePanels = () => {
    const { fields, isComplete } = decision;
    const query = { classes: [...picker.chosen], fields, isComplete };
    for (const panel of Object.values(panels)) panel?.setQuery(query);
  };
  picker.addEventListener("change", updatePanels);
  decision.addEventListener("change", updatePanels);
  updatePanels();
  onDropped(
    (files) => panelForInputs(panels, tabs).addFiles(files),
    (text) => panelForInputs(panels, tabs).addText(text),
  );
  byId("query").hidden = false;
  byId("panels").hidden = false;
  byId("class-input").focus();
}

// The panel that receives dropped inputs, whose tab is opened.
function panelForInputs(panels, tabs) {
  tabs.show("query");
  return panels.query;
}

function describe({ bundle, num_classes: classes, reads, loss }) {
  document.title = `${bundle} · kway`;
  byId("served").replaceChildren(nameOf(bundle), ` · ${count(classes, "class", "classes")} · accepts ${reads}`);
  byId("notice").hidden = loss.aligned;
  if (loss.aligned) return;
  byId("notice").replaceChildren(
    element("strong", {}, "Use these verdicts with caution. "),
    `This model was trained with ${loss.kind}, which is not aligned with the Principle of Logit ` +
      "Separation: the logit of a single class is not a reliable score.",
  );
}

start().catch((error) => {
  byId("served").textContent = "";
  byId("page-error").textContent = `The page failed to load: ${error.message}. Reload it to try again.`;
  byId("page-error").hidden = false;
  throw error;
});
