// The chat page: what was said, what is sent, and the one answer that may be on its way.

import { ApiFailure, getModels, streamChat } from "./api.js";
import { announce, byId, el } from "./dom.js";
import { live } from "./live.js";
import { Settings } from "./sampling.js";
import { AnswerTurn, UserTurn, keepAtEnd } from "./transcript.js";

const STARTERS = [
  "Explain paged attention to someone who knows operating systems.",
  "Write a Python function that merges overlapping intervals, with a test.",
  "Compare tensor and pipeline parallelism in a table.",
];
const WIDE = window.matchMedia("(min-width: 1000px)");

class Chat {
  constructor(askForKey) {
    this.askForKey = askForKey;
    this.settings = new Settings();
    this.messages = [];
    this.answer = null; // the turn that is on its way
    this.abort = null;
    this.draft = byId("draft");
    this.listen();
    this.drawOpening();
    this.showSettings(false);
  }

  listen() {
    byId("composer").addEventListener("submit", (event) => { event.preventDefault(); this.send(); });
    this.draft.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send();
      }
    });
    this.draft.addEventListener("input", () => this.fit());
    byId("stop").addEventListener("click", () => this.stop());
    byId("clear").addEventListener("click", () => this.clear());
    byId("settings-button").addEventListener("click", () => this.showSettings(!this.settingsShown));
    byId("settings-close").addEventListener("click", () => this.showSettings(false));
    document.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || byId("chat").hidden) return;
      if (this.settingsShown && !WIDE.matches) this.showSettings(false);
      else this.stop();
    });
    WIDE.addEventListener("change", () => this.showSettings(false));
    byId("model").addEventListener("change", () => this.drawOpening());
    live.listeners.add(() => this.drawOpening());
  }

  showSettings(shown) {
    this.settingsShown = shown;
    byId("chat").classList.toggle("with-settings", shown);
    byId("settings").hidden = !shown && !WIDE.matches;
    byId("settings-button").setAttribute("aria-expanded", String(shown));
    if (shown) byId("settings").querySelector("select, input").focus();
    else if (byId("settings").contains(document.activeElement)) byId("settings-button").focus();
  }

  async loadModels() {
    try {
      this.settings.setModels((await getModels()).map((model) => model.id));
      this.drawOpening();
    } catch (error) {
      if (error.status === 401) this.askForKey();
    }
  }

  drawOpening() {
    const model = live.state?.models.find((one) => one.names.includes(this.settings.model)) || live.state?.models[0];
    if (model && !byId("model").options.length) this.settings.setModels(live.state.models.flatMap((one) => one.names));
    byId("opening-model").textContent = this.settings.model || model?.name || "xllm-npu";
    byId("opening-facts").textContent = !model ? "" : [
      model.device, model.dtype, model.max_model_len ? `${model.max_model_len.toLocaleString("en")} tokens of context` : "",
      model.status === "ready" ? "" : model.status].filter(Boolean).join(" / ");
    if (!byId("starters").children.length) {
      byId("starters").append(...STARTERS.map((text) => el("li", {}, el("button", {
        type: "button", on: { click: () => { this.draft.value = text; this.send(); } } }, text))));
    }
  }

  fit() {
    this.draft.style.height = "auto";
    this.draft.style.height = `${Math.min(this.draft.scrollHeight, window.innerHeight * 0.4)}px`;
  }

  send() {
    const text = this.draft.value.trim();
    if (!text || this.answer) return;
    this.draft.value = "";
    this.fit();
    this.messages.push({ role: "user", content: text });
    byId("opening").hidden = true;
    byId("clear").hidden = false;
    byId("turns").append(new UserTurn(text).node);
    byId("scroller").scrollTop = byId("scroller").scrollHeight;
    this.ask();
  }

  again(turn) {
    if (this.answer || turn !== this.lastTurn) return;
    turn.node.remove();
    if (this.messages.at(-1)?.role === "assistant") this.messages.pop();
    this.ask();
  }

  async ask() {
    const turn = new AnswerTurn(this.settings.model || "model", () => this.again(turn));
    this.answer = this.lastTurn = turn;
    this.abort = new AbortController();
    keepAtEnd(() => byId("turns").append(turn.node));
    this.showBusy(true);
    announce("The answer is being written");
    let reason = "";
    let failure = "";
    try {
      for await (const chunk of streamChat(this.body(), this.abort.signal)) turn.take(chunk);
    } catch (error) {
      if (error.name === "AbortError") reason = "stopped";
      else failure = this.told(error);
    }
    if (turn.text || turn.reasoning) this.messages.push({ role: "assistant", content: turn.text });
    turn.end(reason, failure);
    this.answer = null;
    this.showBusy(false);
    announce(failure || `The answer has ${turn.tokens} tokens`);
  }

  told(error) {
    if (!(error instanceof ApiFailure)) return "The answer broke off.";
    if (error.status === 401) this.askForKey();
    return error.retryAfter ? `${error.message} (after ${error.retryAfter} s)` : error.message;
  }

  body() {
    const { system, model } = this.settings;
    return {
      ...this.settings.body(),
      ...(model ? { model } : {}),
      messages: [...(system ? [{ role: "system", content: system }] : []), ...this.messages],
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
    };
  }

  stop() {
    if (this.answer) this.abort.abort();
  }

  clear() {
    this.stop();
    this.messages = [];
    byId("turns").replaceChildren();
    byId("opening").hidden = false;
    byId("clear").hidden = true;
    this.draft.focus();
  }

  showBusy(busy) {
    byId("send").hidden = busy;
    byId("stop").hidden = !busy;
    if (document.activeElement === document.body) this.draft.focus();
  }
}

export function startChat(askForKey) {
  const chat = new Chat(askForKey);
  chat.loadModels();
  return chat;
}
