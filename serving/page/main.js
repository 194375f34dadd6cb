// The page: one query at the top, which applies to the tabs below.
import { Api } from "./api.js";
import { Decision } from "./decision.js";
import { byId, count, element, nameOf } from "./elements.js";
import { onDropped } from "./files.js";
import { GalleryPanel } from "./gallery.js";
import { Picker } from "./picker.js";
import { QueryPanel } from "./query.js";
import { Tokens } from "./tokens.js";

const TABS = ["query", "gallery"];

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
  setUpTabs();
  byId("tabs").hidden = panels.gallery === null; // a single panel needs no tabs
  const updatePanels = () => {
    const { fields, isComplete } = decision;
    const query = { classes: [...picker.chosen], fields, isComplete };
    for (const panel of Object.values(panels)) panel?.setQuery(query);
  };
  picker.addEventListener("change", updatePanels);
  decision.addEventListener("change", updatePanels);
  updatePanels();
  // Dropped and pasted inputs open the tab of queries.
  onDropped((files, text) => {
    showTab("query");
    if (files.length) panels.query.addFiles(files);
    else panels.query.addText(text);
  });
  byId("query").hidden = false;
  byId("panels").hidden = false;
  byId("class-input").focus();
}

// The tabs follow the ARIA pattern: an arrow key selects the other one.
function setUpTabs() {
  for (const [index, name] of TABS.entries()) {
    const tab = byId(`tab-${name}`);
    tab.addEventListener("click", () => showTab(name));
    tab.addEventListener("keydown", ({ key }) => {
      if (key !== "ArrowLeft" && key !== "ArrowRight") return;
      showTab(TABS[1 - index]);
      byId(`tab-${TABS[1 - index]}`).focus();
    });
  }
}

function showTab(name) {
  for (const one of TABS) {
    byId(`tab-${one}`).setAttribute("aria-selected", String(one === name));
    byId(`tab-${one}`).tabIndex = one === name ? 0 : -1;
    byId(`panel-${one}`).hidden = one !== name;
  }
  byId(`panel-${name}`).dispatchEvent(new Event("shown"));
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
