// Runs the exported networks on what is drawn; docs/try.md explains the page.

const SIZE = 280; // of the canvas, in pixels
const INSIDE = 20; // a digit fills 20 of 28 pixels, as in MNIST
const page = document.getElementById("try");
const here = new URL(".", import.meta.url);

/** Return an element with attributes, a text and children. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** What is drawn, on a canvas of its own, and how far it is turned. */
class Drawing {
  constructor() {
    this.shown = make("canvas", {
      width: SIZE, height: SIZE, class: "try-canvas", role: "img", "aria-label": "Draw a digit here",
    });
    this.ink = make("canvas", { width: SIZE, height: SIZE });
    this.turn = 0;
    this.clear();
  }

  clear() {
    this.fill(this.ink);
    this.show();
  }

  fill(canvas) {
    const context = canvas.getContext("2d", { willReadFrequently: true });
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.fillStyle = "black";
    context.fillRect(0, 0, SIZE, SIZE);
    return context;
  }

  /** Draw a line from one place of the shown canvas to another. */
  line(from, to) {
    const context = this.ink.getContext("2d", { willReadFrequently: true });
    const [start, end] = [this.unturned(from), this.unturned(to)];
    context.strokeStyle = "white";
    context.lineWidth = 22;
    context.lineCap = "round";
    context.beginPath();
    context.moveTo(...start);
    context.lineTo(...end);
    context.stroke();
    this.show();
  }

  unturned([x, y]) {
    const angle = (-this.turn * Math.PI) / 180;
    const [right, down] = [x - SIZE / 2, y - SIZE / 2];
    return [
      SIZE / 2 + right * Math.cos(angle) - down * Math.sin(angle),
      SIZE / 2 + right * Math.sin(angle) + down * Math.cos(angle),
    ];
  }

  /** Take an image of 28 x 28 bytes. */
  take(bytes) {
    const small = make("canvas", { width: 28, height: 28 });
    const pixels = new ImageData(28, 28);
    bytes.forEach((value, place) => pixels.data.set([value, value, value, 255], 4 * place));
    small.getContext("2d").putImageData(pixels, 0, 0);
    this.fill(this.ink).drawImage(small, 0, 0, SIZE, SIZE);
    this.show();
  }

  show() {
    const context = this.fill(this.shown);
    context.translate(SIZE / 2, SIZE / 2);
    context.rotate((this.turn * Math.PI) / 180);
    context.drawImage(this.ink, -SIZE / 2, -SIZE / 2);
  }

  /** Return the image as MNIST has it: as large as the box, its mass in the middle; null if empty. */
  image() {
    const context = this.shown.getContext("2d", { willReadFrequently: true });
    const { data } = context.getImageData(0, 0, SIZE, SIZE);
    let [left, top, right, bottom] = [SIZE, SIZE, -1, -1];
    let [mass, sumX, sumY] = [0, 0, 0];
    for (let y = 0; y < SIZE; y++) {
      for (let x = 0; x < SIZE; x++) {
        const value = data[4 * (y * SIZE + x)];
        if (value < 40) continue;
        [left, right] = [Math.min(left, x), Math.max(right, x)];
        [top, bottom] = [Math.min(top, y), Math.max(bottom, y)];
        mass += value;
        sumX += value * x;
        sumY += value * y;
      }
    }
    if (right < 0) return null;
    const scale = INSIDE / Math.max(right - left + 1, bottom - top + 1);
    const small = make("canvas", { width: 28, height: 28 });
    const target = small.getContext("2d", { willReadFrequently: true });
    target.fillStyle = "black";
    target.fillRect(0, 0, 28, 28);
    target.imageSmoothingQuality = "high";
    const [x, y] = [14 - (sumX / mass) * scale, 14 - (sumY / mass) * scale];
    target.drawImage(this.shown, x, y, SIZE * scale, SIZE * scale);
    const pixels = target.getImageData(0, 0, 28, 28).data;
    return Float32Array.from({ length: 784 }, (_, place) => pixels[4 * place] / 255);
  }
}

/** Bars with dots, and the lines below them. */
class Answer {
  constructor() {
    this.bars = Array.from({ length: 10 }, (_, digit) => {
      const bar = make("span", { class: "try-mean" });
      const dots = make("span", { class: "try-dots" });
      const percent = make("span", { class: "try-percent" });
      const row = make("div", { class: "try-row" }, make("b", {}, String(digit)),
        make("span", { class: "try-scale" }, bar, dots), percent);
      return { row, bar, dots, percent };
    });
    this.lines = make("dl", { class: "try-lines", "aria-live": "polite" });
    this.element = make("div", { class: "try-answer" }, ...this.bars.map((x) => x.row), this.lines);
  }

  clear() {
    for (const { row, bar, dots, percent } of this.bars) {
      row.classList.remove("try-in-set");
      bar.style.width = "0";
      dots.replaceChildren();
      percent.textContent = "";
    }
    this.lines.replaceChildren();
  }

  show(outputs, score, limit) {
    const draws = outputs.samples.dims[1];
    this.bars.forEach(({ row, bar, dots, percent }, digit) => {
      const mean = outputs.mean.data[digit];
      row.classList.toggle("try-in-set", Boolean(outputs.set.data[digit]));
      bar.style.width = `${100 * mean}%`;
      percent.textContent = `${Math.round(100 * mean)}%`;
      dots.replaceChildren(...Array.from({ length: draws }, (_, draw) => {
        const value = outputs.samples.data[draw * 10 + digit];
        const dot = make("i");
        dot.style.left = `${100 * value}%`;
        dot.style.top = `${15 + (70 * ((draw * 7) % draws)) / draws}%`;
        return dot;
      }));
    });
    const members = [...outputs.set.data.keys()].filter((digit) => outputs.set.data[digit]);
    const isUnlike = score > limit;
    this.line("set", "Set", `{${members.join(", ")}}`);
    this.line("refuse", "Refuses", outputs.refuse.data[0] ? "yes: below 90%" : "no");
    this.line("unlike", "Unlike the digits it knows",
      `${isUnlike ? "yes" : "no"} (${(score / limit).toFixed(2)} of the limit)`);
    this.line("epistemic", "Epistemic", `${outputs.epistemic.data[0].toFixed(3)} nats`);
    this.line("aleatoric", "Aleatoric", `${outputs.aleatoric.data[0].toFixed(3)} nats`);
    this.element.dataset.state = "done";
  }

  line(name, title, text) {
    if (name === "set") this.lines.replaceChildren();
    this.lines.append(make("dt", {}, title), make("dd", { "data-name": name }, text));
  }
}

/** Connect the mouse, a finger or a pen with the drawing. */
function listen(drawing, changed) {
  const { shown } = drawing;
  let last = null;
  const place = (event) => {
    const box = shown.getBoundingClientRect();
    const scale = SIZE / box.width;
    return [(event.clientX - box.left) * scale, (event.clientY - box.top) * scale];
  };
  shown.addEventListener("pointerdown", (event) => {
    shown.setPointerCapture(event.pointerId);
    last = place(event);
    drawing.line(last, last);
    changed();
  });
  shown.addEventListener("pointermove", (event) => {
    if (last === null) return;
    const next = place(event);
    drawing.line(last, next);
    last = next;
    changed();
  });
  for (const name of ["pointerup", "pointercancel"]) {
    shown.addEventListener(name, () => { last = null; });
  }
}

/** Do what the address asks for: #digit=4&turn=90, or #lines=20,20,260,260;... of the canvas. */
function follow(drawing, digits) {
  const asked = new URLSearchParams(location.hash.slice(1));
  if (asked.has("turn")) drawing.turn = Number(asked.get("turn"));
  if (asked.has("digit")) drawing.take(digits[Number(asked.get("digit"))]);
  for (const text of asked.get("lines")?.split(";") ?? []) {
    const [x0, y0, x1, y1] = text.split(",").map(Number);
    drawing.line([x0, y0], [x1, y1]);
  }
}

async function start() {
  const ort = await import(new URL("ort/ort.wasm.bundle.min.mjs", here));
  ort.env.wasm.numThreads = 1;
  ort.env.wasm.wasmPaths = new URL("ort/", here).href;
  const facts = await (await fetch(new URL("digits.json", here))).json();
  const open = (name) => ort.InferenceSession.create(new URL(name, here).href);
  const [network, detector] = await Promise.all([open("digits.onnx"), open("unusual.onnx")]);
  const digits = facts.digits.map((text) => Uint8Array.from(atob(text), (x) => x.charCodeAt(0)));

  const drawing = new Drawing();
  const answer = new Answer();
  let waiting = false;
  let running = false;
  async function changed() {
    waiting = true;
    if (running) return;
    running = true;
    while (waiting) {
      waiting = false;
      const image = drawing.image();
      if (image === null) {
        answer.clear();
        continue;
      }
      const feeds = { image: new ort.Tensor("float32", image, [1, 28, 28, 1]) };
      const outputs = await network.run(feeds);
      const { score } = await detector.run(feeds);
      answer.show(outputs, score.data[0], facts.unusual);
    }
    running = false;
  }

  const slider = make("input", { type: "range", min: -180, max: 180, value: 0, "aria-label": "Turn" });
  slider.addEventListener("input", () => {
    drawing.turn = Number(slider.value);
    drawing.show();
    changed();
  });
  const clear = make("button", { type: "button", class: "md-button" }, "Clear");
  clear.addEventListener("click", () => { drawing.clear(); changed(); });
  const choices = digits.map((bytes, digit) => {
    const button = make("button", { type: "button", title: `A test image of ${digit}` }, String(digit));
    button.addEventListener("click", () => { drawing.take(bytes); changed(); });
    return button;
  });
  listen(drawing, changed);
  page.replaceChildren(
    make("div", { class: "try-input" }, drawing.shown,
      make("label", { class: "try-turn" }, "Turn", slider),
      make("div", { class: "try-choices" }, ...choices), clear),
    answer.element,
  );
  follow(drawing, digits);
  slider.value = drawing.turn;
  drawing.show();
  await changed();
}

start().catch((error) => {
  const isFile = location.protocol === "file:";
  page.textContent = isFile
    ? "Browsers run networks only on served pages: python -m http.server -d site"
    : `The network could not be loaded (${error.message}). \`make web docs\` builds this page with onnxruntime-web.`;
});
