// The engine's page: one plate a model, drawn again with every state that comes.

import { byId, el } from "./dom.js";
import { HISTORY, live } from "./live.js";
import { drawCells, drawLine } from "./sparkline.js";

const number = (value, digits = 0) => value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const seconds = (value) => (value === null ? "–" : value < 1 ? `${number(value * 1000, value < 0.1 ? 1 : 0)} ms` : `${number(value, 2)} s`);
const percent = (value) => (value === null ? "–" : `${number(value * 100, value > 0 && value < 0.1 ? 1 : 0)} %`);
const ordinary = (value) => number(value, value > 0 && value < 10 ? 1 : 0);

function bytes(count) {
  let value = count;
  let unit = 0;
  while (value >= 1024 && unit < 4) { value /= 1024; unit += 1; }
  return `${number(value, unit ? 1 : 0)} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
}

const DIALS = [
  { key: "generation", label: "Generated", unit: "tokens/s", text: ordinary },
  { key: "prompt", label: "Prompts", unit: "tokens/s", text: ordinary, ink: "--second" },
  { key: "running", label: "Running", unit: "requests", text: (value) => number(value) },
  { key: "waiting", label: "Waiting", unit: "requests", text: (value) => number(value), ink: "--second" },
  { key: "step", label: "Step", unit: "", text: seconds, ink: "--second" },
  { key: "ttft", label: "First token", unit: "", text: seconds },
  { key: "itl", label: "Between tokens", unit: "", text: seconds },
  { key: "hits", label: "Prefix hits", unit: "of prompt tokens", text: percent, ceiling: 1, ink: "--second" },
];

function stateOf(model) {
  if (model.status !== "ready" && model.status !== "sleeping") return model.status;
  if (model.state === "sleeping") return `asleep, level ${model.sleep_level}`;
  if (model.transition) return `${model.transition} in progress`;
  return model.state;
}

class Plate {
  constructor(name) {
    this.badge = el("span", { class: "badge" });
    this.facts = el("p", { class: "facts" });
    this.dials = new Map();
    const row = el("div", { class: "dials" });
    for (const dial of DIALS) {
      const value = el("strong", {});
      const line = el("canvas", { role: "img" });
      row.append(el("div", { class: "dial" }, el("h3", {}, dial.label), el("p", {}, value, " ", el("span", {}, dial.unit)), line));
      this.dials.set(dial.key, { ...dial, value, line });
    }
    this.cells = el("canvas", { class: "cells", role: "img" });
    this.kv = el("p", { class: "kv-text" });
    this.numbers = el("dl", { class: "numbers" });
    this.ranks = el("div", { class: "ranks" });
    this.node = el("section", { class: "plate", "aria-label": name },
      el("header", {}, el("h2", {}, name), this.badge), this.facts, row,
      el("div", { class: "split" }, el("div", { class: "kv" }, el("h3", {}, "KV cache"), this.kv, this.cells),
        el("div", {}, el("h3", {}, "Since the start"), this.numbers)), this.ranks);
  }

  draw(model, past) {
    const now = past[past.length - 1];
    this.badge.textContent = stateOf(model);
    this.badge.dataset.state = model.status === "ready" ? model.state : model.status;
    this.facts.textContent = [model.architecture, model.device, model.dtype,
      model.max_model_len ? `${number(model.max_model_len)} tokens of context` : "",
      model.weight_bytes ? `${bytes(model.weight_bytes)} of weights` : "",
      model.ranks > 1 ? `${model.ranks} devices` : ""].filter(Boolean).join(" / ");
    for (const [key, dial] of this.dials) {
      // What happens in steps is shown as it was when the last step ran.
      const shown = now[key] === null ? [...past].reverse().find((one) => one[key] !== null)?.[key] ?? null : now[key];
      dial.value.textContent = dial.text(shown);
      dial.line.setAttribute("aria-label", `${dial.label}, the last ${past.length} seconds; now ${dial.text(shown)} ${dial.unit}`);
      drawLine(dial.line, past.map((one) => one[key]), { length: HISTORY, ceiling: dial.ceiling, ink: dial.ink || "--accent" });
    }
    this.drawCache(model, now);
    this.drawNumbers(model);
    this.drawRanks(model);
  }

  drawCache(model, now) {
    const pages = model.engines.map((engine) => engine.pages).filter(Boolean);
    const total = pages.reduce((count, one) => count + one.mapped + one.free + one.reserved, 0);
    const mapped = pages.reduce((count, one) => count + one.mapped, 0);
    const blocks = model.num_kv_blocks * Math.max(1, model.engines.length);
    let text = `${percent(now.kv)} of ${number(blocks)} blocks of ${model.block_size} tokens, ${bytes(model.kv_cache_bytes)}`;
    if (pages.length) text += `; ${number(mapped)} pages have memory`;
    this.kv.textContent = text;
    this.cells.setAttribute("aria-label", text);
    drawCells(this.cells, blocks, now.kv, total ? mapped / total : 1);
  }

  drawNumbers(model) {
    const sum = (name) => model.engines.reduce((count, engine) => count + engine[name], 0);
    const queries = sum("prefix_queries_total");
    const memory = Object.entries(model.memory_bytes).map(([owner, count]) => [`Memory of ${owner.replace("_", " ")}`, bytes(count)]);
    const ended = Object.entries(model.finished).filter(([, count]) => count).map(([reason, count]) => `${number(count)} ${reason}`);
    const rows = [
      ["Tokens generated", number(sum("generation_tokens_total"))],
      ["Prompt tokens computed", number(sum("prompt_tokens_total"))],
      ["Prefix hits", queries ? percent(sum("prefix_hits_total") / queries) : "–"],
      ["Steps", number(sum("steps_total"))],
      ["Preemptions", number(sum("preemptions_total"))],
      ["Requests ended", ended.join(", ") || "none"],
      ...memory,
    ];
    this.numbers.replaceChildren(...rows.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
  }

  drawRanks(model) {
    if (model.engines.length < 2) { this.ranks.replaceChildren(); return; }
    const head = ["Engine", "Running", "Waiting", "KV in use", "Step", "Steps"];
    this.ranks.replaceChildren(el("div", { class: "table" }, el("table", {},
      el("thead", {}, el("tr", {}, ...head.map((name) => el("th", { scope: "col" }, name)))),
      el("tbody", {}, ...model.engines.map((engine, rank) => el("tr", {}, ...[String(rank), number(engine.running),
        number(engine.waiting), percent(engine.kv_usage), seconds(engine.step_seconds), number(engine.steps_total),
      ].map((text) => el("td", {}, text))))))));
  }
}

class EnginePage {
  constructor() {
    this.note = el("p", { class: "failure", role: "alert", hidden: true });
    this.plates = new Map();
    this.list = el("div", { class: "plates" });
    this.foot = el("p", { class: "foot" });
    byId("engine").append(el("h1", { class: "hidden" }, "Engine"), this.note, this.list, this.foot);
    live.listeners.add(() => this.draw());
    window.addEventListener("resize", () => this.draw());
  }

  draw() {
    this.note.hidden = !live.failure;
    this.note.textContent = live.failure ? live.failure.message : "";
    this.list.classList.toggle("stale", Boolean(live.failure));
    if (!live.state || byId("engine").hidden) return;
    const names = live.state.models.map((model) => model.name);
    for (const [name, plate] of this.plates) {
      if (!names.includes(name)) { plate.node.remove(); this.plates.delete(name); }
    }
    for (const model of live.state.models) {
      if (!this.plates.has(model.name)) {
        const plate = new Plate(model.name);
        this.plates.set(model.name, plate);
        this.list.append(plate.node);
      }
      this.plates.get(model.name).draw(model, live.history.get(model.name));
    }
    this.foot.textContent = `xllm-npu ${live.state.version}. The lines show the last two minutes that this page was open.`;
  }
}

export const startEngine = () => new EnginePage();
