// The settings of a request: what is left empty is not sent, and so is the model's own default.

import { byId, el } from "./dom.js";

const STORE = "xllm-npu.settings";

const FIELDS = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.1, hint: "0 takes the likeliest token" },
  { name: "top_p", label: "Top p", min: 0.01, max: 1, step: 0.01, hint: "Smallest set of tokens with this probability" },
  { name: "top_k", label: "Top k", min: 0, max: 1000, step: 1, hint: "Likeliest tokens to draw from; 0: all" },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: 0.01, hint: "Least probability, as a share of the likeliest's" },
  { name: "repetition_penalty", label: "Repetition", min: 0.1, max: 2, step: 0.05, hint: "Above 1 avoids tokens seen before" },
  { name: "presence_penalty", label: "Presence", min: -2, max: 2, step: 0.1, hint: "Above 0 favours new tokens" },
  { name: "max_tokens", label: "Max tokens", min: 1, max: 1000000, step: 1, hint: "Tokens of the answer at most" },
  { name: "seed", label: "Seed", min: 0, max: 2147483647, step: 1, hint: "The same seed gives the same answer" },
];

function load() {
  try {
    return JSON.parse(localStorage.getItem(STORE)) || {};
  } catch {
    return {};
  }
}

export class Settings {
  constructor() {
    this.values = load();
    this.inputs = new Map();
    const grid = el("div", { class: "grid" });
    for (const field of FIELDS) {
      const { name, label, hint, ...limits } = field;
      const input = el("input", { id: `set-${name}`, type: "number", inputmode: "decimal", placeholder: "default" });
      for (const [key, value] of Object.entries(limits)) input[key] = String(value);
      input.title = hint;
      grid.append(el("label", { for: `set-${name}`, title: hint }, label), input);
      this.keep(name, input);
    }
    const thinking = el("select", { id: "set-thinking" }, ...[["", "default"], ["on", "on"], ["off", "off"]].map(
      ([value, text]) => el("option", { value }, text)));
    thinking.title = "For models whose template has a switch";
    grid.append(el("label", { for: "set-thinking" }, "Reasoning"), thinking);
    this.keep("thinking", thinking);
    const stop = el("input", { id: "set-stop", type: "text", placeholder: "none", title: "Text that ends the answer" });
    grid.append(el("label", { for: "set-stop" }, "Stop at"), stop);
    this.keep("stop", stop);
    byId("sampling").append(grid);
    this.keep("system", byId("system"));
    this.keep("model", byId("model"));
    byId("reset").addEventListener("click", () => this.reset());
  }

  keep(name, input) {
    this.inputs.set(name, input);
    input.value = this.values[name] || "";
    input.addEventListener("input", () => {
      this.values[name] = input.value;
      localStorage.setItem(STORE, JSON.stringify(this.values));
    });
  }

  reset() {
    for (const [name, input] of this.inputs) {
      if (name === "model") continue;
      input.value = "";
      delete this.values[name];
    }
    localStorage.setItem(STORE, JSON.stringify(this.values));
  }

  setModels(names) {
    const select = byId("model");
    const had = [...select.options].map((option) => option.value);
    if (had.join("\n") === names.join("\n")) return;
    select.replaceChildren(...names.map((name) => el("option", { value: name }, name)));
    select.value = names.includes(this.values.model) ? this.values.model : names[0] || "";
  }

  get model() {
    return byId("model").value;
  }

  get system() {
    return byId("system").value.trim();
  }

  // Fields of the request's body. A field that the browser finds malformed is left out, and marked by it.
  body() {
    const body = {};
    for (const { name } of FIELDS) {
      const input = this.inputs.get(name);
      if (input.value !== "" && Number.isFinite(input.valueAsNumber)) body[name] = input.valueAsNumber;
    }
    const thinking = this.inputs.get("thinking").value;
    if (thinking) body.chat_template_kwargs = { enable_thinking: thinking === "on" };
    const stop = this.inputs.get("stop").value;
    if (stop) body.stop = [stop];
    return body;
  }
}
