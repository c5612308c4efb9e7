// What the engine does, asked for once a second while somebody looks: the last two minutes of it, by model.

import { getState } from "./api.js";

export const HISTORY = 120;
const PERIOD = 1000;
const WORST_PERIOD = 10000;

const sum = (engines, name) => engines.reduce((total, engine) => total + engine[name], 0);

// Figures of one moment, from two states: rates are over the time between them.
export function figuresOf(model, before, seconds) {
  const engines = model.engines;
  const rise = (name) => (before ? Math.max(0, sum(engines, name) - sum(before.engines, name)) : 0);
  const rate = (name) => (before && seconds > 0 ? rise(name) / seconds : 0);
  const mean = (name) => {
    const now = model.latencies[name];
    const then = before ? before.latencies[name] : now;
    const count = now.count - then.count;
    return count > 0 ? (now.sum - then.sum) / count : null;
  };
  const queries = rise("prefix_queries_total");
  const steps = rise("steps_total");
  return {
    running: sum(engines, "running"),
    waiting: sum(engines, "waiting"),
    kv: engines.length ? sum(engines, "kv_usage") / engines.length : 0,
    generation: rate("generation_tokens_total"),
    prompt: rate("prompt_tokens_total"),
    steps: rate("steps_total"),
    step: steps ? Math.max(...engines.map((engine) => engine.step_seconds)) : null,
    hits: queries ? rise("prefix_hits_total") / queries : null,
    ttft: mean("time_to_first_token_seconds"),
    itl: mean("inter_token_latency_seconds"),
  };
}

class Live {
  constructor() {
    this.state = null;
    this.failure = null;
    this.history = new Map(); // model name -> figures, oldest first
    this.listeners = new Set();
    this.period = PERIOD;
    this.timer = 0;
  }

  start() {
    document.addEventListener("visibilitychange", () => this.schedule(0));
    this.schedule(0);
  }

  schedule(wait) {
    clearTimeout(this.timer);
    if (!document.hidden) this.timer = setTimeout(() => this.ask(), wait);
  }

  async ask() {
    try {
      const state = await getState();
      this.take(state);
      this.failure = null;
      this.period = PERIOD;
    } catch (error) {
      this.failure = error;
      this.period = Math.min(WORST_PERIOD, this.period * 2);
    }
    for (const listener of this.listeners) listener(this);
    this.schedule(this.period);
  }

  take(state) {
    const seconds = this.state ? state.time - this.state.time : 0;
    if (this.state && seconds === 0) return; // the server's own once a second
    const restarted = seconds < 0;
    const before = new Map((this.state && !restarted ? this.state.models : []).map((model) => [model.name, model]));
    for (const model of state.models) {
      const past = this.history.get(model.name) || [];
      past.push(figuresOf(model, before.get(model.name), seconds));
      if (past.length > HISTORY) past.shift();
      this.history.set(model.name, past);
    }
    this.state = state;
  }

  // The whole server's, for the header.
  total(name) {
    let value = 0;
    for (const past of this.history.values()) if (past.length) value += past[past.length - 1][name] || 0;
    return value;
  }

  totals(name) {
    const series = [...this.history.values()];
    const length = Math.max(0, ...series.map((past) => past.length));
    return Array.from({ length }, (_, i) => series.reduce((value, past) => {
      const figures = past[past.length - length + i];
      return value + (figures ? figures[name] || 0 : 0);
    }, 0));
  }
}

export const live = new Live();
