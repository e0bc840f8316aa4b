// The page: what is chosen, and how it is shown.
import { PageError } from "./errors.js";
import { project, turbo } from "./heatmap.js";
import { Model } from "./model.js";
import { geometry, readPicture } from "./preprocessing.js";

const SCENES = [
  "1-shirt-sneaker",
  "2-trouser-sneaker",
  "3-dress-ankle-boot",
  "4-dress-ankle-boot",
  "5-bag-shirt",
  "6-pullover-trouser",
];
const LIKELIEST = 5;
const LARGEST_SHOWN = 1600; // pixels of the longer side; more are not seen, and take time
const SMALL = 200; // pixels; a picture below is shown with its pixels as squares
// For each of 256 values the four bytes of an opaque pixel, in the order that canvases have them.
const COLORS = new Uint32Array(
  Uint8Array.from(
    Array.from({ length: 256 }, (_, value) => [...turbo(value / 255), 255]).flat(),
  ).buffer,
);

/** What is loaded, chosen and shown at this moment. */
export const state = {
  model: null,
  picture: null, // the one asked for last, as readPicture gives it
  method: null,
  shown: null, // what Model.explain gave, and for what: { model, picture, way, method, ... }
};

const element = (id) => document.getElementById(id);
const say = (message) => (element("status").textContent = message);

// A job that a later one of its kind has overtaken shows nothing any more.
const latest = { model: 0, picture: 0, explanation: 0 };
let running = 0;

/** Runs a job, which is told how to ask whether it is overtaken; shows what goes wrong in it. */
async function attempt(kind, job) {
  const number = ++latest[kind];
  const current = () => number === latest[kind];
  element("error").hidden = true;
  running += 1;
  document.body.ariaBusy = "true";
  try {
    await job(current);
  } catch (error) {
    if (!(error instanceof PageError)) console.error(error);
    if (current()) {
      element("error").textContent =
        error instanceof PageError ? error.message : `Something went wrong: ${error.message}.`;
      element("error").hidden = false;
      describe();
    }
  } finally {
    running -= 1;
    document.body.ariaBusy = String(running > 0);
  }
}

// What the user brings: a picture or a model, from a file, a drop, an example or an address.

const useModel = (read, name) =>
  attempt("model", async (current) => {
    say(`Loading ${name}`);
    const model = await Model.load(await read(), name);
    if (!current()) return model.release();
    const before = state.model;
    state.model = model;
    element("model").textContent = name;
    fillChoices();
    await Promise.all([explain(), before?.release()]);
  });

const usePicture = (read, name) =>
  attempt("picture", async (current) => {
    say(`Reading ${name}`);
    const picture = await readPicture(await read(), name);
    if (!current()) return;
    state.picture = picture;
    await explain();
  });

function useFile(file) {
  if (!file) return;
  if (/\.onnx$/i.test(file.name)) {
    useModel(async () => new Uint8Array(await file.arrayBuffer()), file.name);
  } else {
    usePicture(() => file, file.name);
  }
}

async function download(url) {
  let response;
  try {
    response = await fetch(url);
  } catch {
    throw new PageError(`${url} cannot be fetched: there is no connection, or its server forbids it.`);
  }
  if (!response.ok) throw new PageError(`${url} cannot be fetched: status ${response.status}.`);
  return response;
}

// Explaining and showing.

/** Explains the picture for a class, or for the prediction if none is given, and shows the result. */
const explain = (target) =>
  attempt("explanation", async (current) => {
    const { model, picture } = state;
    if (model === null || picture === null) return; // the other one is on its way
    say(`Explaining ${picture.name}`);
    try {
      const way = geometry(picture, model.contract.input);
      const result = await model.explain(picture, way, target);
      if (!current()) return;
      state.shown = { model, picture, way, ...result };
    } catch (error) {
      if (current()) state.picture = state.shown?.picture ?? null;
      throw error;
    }
    showPicture();
    showClasses();
    showMap();
  });

function fillChoices() {
  const { model } = state;
  const { classes } = model.contract;
  const all = Array.from({ length: classes }, (_, index) => new Option(model.label(index), index));
  element("class").replaceChildren(...all);
  const options = model.methods.map((method) => new Option(inWords(method), method));
  element("method").replaceChildren(...options);
  if (!model.methods.includes(state.method)) [state.method] = model.methods;
  element("method").value = state.method;
  element("class").disabled = element("method").disabled = false;
}

function showPicture() {
  const { picture } = state.shown;
  for (const button of element("scenes").children) {
    button.ariaPressed = String(button.dataset.name === picture.name);
  }
  const shrink = Math.min(1, LARGEST_SHOWN / Math.max(picture.width, picture.height));
  const width = Math.max(1, Math.round(picture.width * shrink));
  const height = Math.max(1, Math.round(picture.height * shrink));
  for (const canvas of [element("picture"), element("overlay")]) {
    Object.assign(canvas, { width, height });
    canvas.style.setProperty("--shape", width / height);
  }
  element("picture").style.imageRendering = Math.max(width, height) < SMALL ? "pixelated" : "auto";
  element("picture").getContext("2d").drawImage(picture.canvas, 0, 0, width, height);
}

function showClasses() {
  const { model, probabilities, target } = state.shown;
  const order = probabilities.map((_, index) => index);
  order.sort((a, b) => probabilities[b] - probabilities[a]);
  const rows = order.slice(0, LIKELIEST).map((index) => {
    const radio = document.createElement("input");
    Object.assign(radio, { type: "radio", name: "likeliest", value: index });
    radio.checked = index === target;
    const row = document.createElement("label");
    row.style.setProperty("--share", `${100 * probabilities[index]}%`);
    row.append(radio, span(model.label(index)), span(percent(probabilities[index])));
    return row;
  });
  // A choice made with the keyboard goes on from where it is.
  const focused = element("likeliest").contains(document.activeElement);
  element("likeliest").replaceChildren(...rows);
  if (focused) element("likeliest").querySelector(":checked")?.focus();
  element("class").value = target;
}

function span(text) {
  const made = document.createElement("span");
  made.textContent = text;
  return made;
}

const percent = (share) => `${(100 * share).toFixed(1)} %`;

function showMap() {
  const { model, way, maps } = state.shown;
  state.shown.method = state.method;
  const canvas = element("overlay");
  const context = canvas.getContext("2d");
  context.clearRect(0, 0, canvas.width, canvas.height);
  const { heatmap } = maps.get(state.method);
  if (heatmap !== null) {
    const seen = project(heatmap, { ...way, original: [canvas.height, canvas.width] });
    const image = new ImageData(seen.columns, seen.rows);
    const pixels = new Uint32Array(image.data.buffer);
    seen.data.forEach((value, i) => (pixels[i] = COLORS[Math.round(value * 255)]));
    context.putImageData(image, seen.left, seen.top);
  }
  element("any-class").hidden = model.isClassSpecific(state.method);
  describe();
}

/** Says in words what the picture shows. */
function describe() {
  const { model, shown } = state;
  element("save").hidden = shown === null;
  if (shown === null) {
    say(model === null ? "No model" : "No picture");
    return;
  }
  const name = inWords(shown.method);
  const label = shown.model.label(shown.target);
  const prediction = `${label}, ${percent(shown.probabilities[shown.target])}.`;
  const blank = shown.maps.get(shown.method).heatmap === null;
  say(
    blank
      ? `${prediction} The map of ${name} is blank: it is the same everywhere, so there is nothing to show.`
      : `${prediction} Map of ${name}.`,
  );
  element("picture").ariaLabel = blank
    ? shown.picture.name
    : `${shown.picture.name} with the map of ${name} for ${label}`;
}

const inWords = (method) => method.replaceAll("_", " ");

function save() {
  const [picture, overlay] = [element("picture"), element("overlay")];
  const canvas = document.createElement("canvas");
  Object.assign(canvas, { width: picture.width, height: picture.height });
  const context = canvas.getContext("2d");
  context.drawImage(picture, 0, 0);
  context.globalAlpha = element("opacity").value / 100;
  context.drawImage(overlay, 0, 0);
  element("save").href = canvas.toDataURL("image/png");
}

function start() {
  for (const name of SCENES) {
    const button = document.createElement("button");
    const image = document.createElement("img");
    const words = name.replace("-", ": ").replace("-", " and ").replaceAll("-", " ");
    Object.assign(image, { src: `scenes/${name}.png`, alt: `Scene ${words}`, width: 64, height: 64 });
    button.type = "button";
    button.dataset.name = name;
    button.append(image);
    button.addEventListener("click", () => useScene(name));
    element("scenes").append(button);
  }
  const ramp = new ImageData(new Uint8ClampedArray(COLORS.buffer.slice(0)), 256, 1);
  element("legend").getContext("2d").putImageData(ramp, 0, 0);
  listen();
  begin();
}

const useScene = (name) =>
  usePicture(async () => (await download(`scenes/${name}.png`)).blob(), name);

async function begin() {
  const url = new URLSearchParams(location.search).get("model") ?? "garments.onnx";
  const name = url.split(/[?#]/)[0].split("/").at(-1);
  await useModel(async () => new Uint8Array(await (await download(url)).arrayBuffer()), name);
  if (state.model !== null && state.picture === null) await useScene(SCENES[0]);
}

function listen() {
  for (const id of ["picture-file", "model-file"]) {
    element(id).addEventListener("change", ({ target }) => {
      useFile(target.files[0]);
      target.value = ""; // so that the same file can be chosen again
    });
  }
  const explainClass = ({ target }) => explain(Number(target.value));
  element("likeliest").addEventListener("change", explainClass);
  element("class").addEventListener("change", explainClass);
  element("method").addEventListener("change", ({ target }) => {
    state.method = target.value;
    if (state.shown?.model === state.model) showMap(); // if not, it is about to be shown
  });
  const fade = () => (element("overlay").style.opacity = element("opacity").value / 100);
  element("opacity").addEventListener("input", fade);
  fade();
  element("save").addEventListener("click", save);

  const carriesFiles = (event) => event.dataTransfer?.types.includes("Files");
  document.addEventListener("dragover", (event) => {
    if (!carriesFiles(event)) return;
    event.preventDefault();
    document.body.classList.add("drop");
  });
  document.addEventListener("dragleave", (event) => {
    if (event.relatedTarget === null) document.body.classList.remove("drop");
  });
  document.addEventListener("drop", (event) => {
    if (!carriesFiles(event)) return;
    event.preventDefault();
    document.body.classList.remove("drop");
    useFile(event.dataTransfer.files[0]);
  });
}

start();
