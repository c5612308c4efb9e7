// The conversation as it is shown: one turn a message, with its figures beside it.

import { byId, copyButton, el } from "./dom.js";
import { MarkdownView } from "./markdown.js";

const NEAR_END = 80; // pixels from the end within which the view follows

export class UserTurn {
  constructor(text) {
    this.node = el("article", { class: "turn you", "aria-label": "You" },
      el("div", { class: "who" }, el("b", {}, "You")), el("div", { class: "said" }, text));
  }
}

export class AnswerTurn {
  // `onAgain` is asked for another answer.
  constructor(model, onAgain) {
    this.text = "";
    this.reasoning = "";
    this.began = performance.now();
    this.first = 0;
    this.last = 0;
    this.answering = 0;
    this.tokens = 0;
    this.drawing = false;
    this.figures = el("div", { class: "figures" }, el("span", {}, "waiting"));
    this.body = el("div", { class: "said markdown" });
    this.view = new MarkdownView(this.body);
    this.thought = el("div", { class: "thought" });
    this.summary = el("summary", {}, "Reasoning");
    this.details = el("details", { class: "reasoning", hidden: true }, this.summary, this.thought);
    this.failure = el("p", { class: "failure", role: "alert", hidden: true });
    this.actions = el("div", { class: "actions", hidden: true }, copyButton(() => this.text),
      el("button", { type: "button", class: "quiet again", on: { click: onAgain } }, "Try again"));
    this.node = el("article", { class: "turn answer streaming", "aria-label": model },
      el("div", { class: "who" }, el("b", {}, model), this.figures),
      el("div", { class: "said-box" }, this.details, this.body, this.failure, this.actions));
  }

  take(chunk) {
    if (chunk.usage) this.tokens = chunk.usage.completion_tokens;
    const choice = chunk.choices[0];
    if (!choice) return;
    const { content, reasoning, reasoning_content: older } = choice.delta;
    const thought = reasoning || older;
    if (content || thought) {
      this.last = performance.now();
      this.first ||= this.last;
      if (content) this.answering ||= this.last;
    }
    this.reasoning += thought || "";
    this.text += content || "";
    for (const call of choice.delta.tool_calls || []) this.takeCall(call);
    this.reason = choice.finish_reason || this.reason;
    this.redraw();
  }

  takeCall(call) {
    const part = call.function || {};
    if (part.name) this.text += `\n\n\`${part.name}\`\n\n`;
    if (part.arguments) this.text += `\n~~~json\n${part.arguments}\n~~~\n`;
  }

  // At most once a frame, however many tokens come.
  redraw() {
    if (this.drawing) return;
    this.drawing = true;
    requestAnimationFrame(() => {
      this.drawing = false;
      keepAtEnd(() => this.draw());
    });
  }

  draw() {
    this.view.draw(this.text);
    if (this.reasoning) {
      this.details.hidden = false;
      this.thought.textContent = this.reasoning.trim();
      const until = this.answering || (this.ended ? this.last : performance.now());
      this.summary.textContent = `${this.answering || this.ended ? "Reasoned" : "Reasoning"} for ${((until - this.first) / 1000).toFixed(1)} s`;
    }
    const shown = this.figuresNow().map((text) => el("span", {}, text));
    this.figures.replaceChildren(...(shown.length ? shown : [el("span", {}, this.ended ? "no answer" : "waiting")]));
  }

  figuresNow() {
    const shown = [];
    if (this.first) shown.push(`${Math.round(this.first - this.began)} ms to first token`);
    const seconds = (this.last - this.first) / 1000;
    if (this.tokens > 1 && seconds > 0.05) shown.push(`${((this.tokens - 1) / seconds).toFixed(1)} tokens/s`);
    if (this.tokens) shown.push(`${this.tokens} token${this.tokens === 1 ? "" : "s"}`);
    if (this.ended && this.reason && this.reason !== "stop") shown.push(this.reason === "length" ? "cut at the limit" : this.reason);
    return shown;
  }

  end(reason, failure) {
    this.ended = true;
    this.reason = reason || this.reason;
    this.node.classList.remove("streaming");
    this.node.dataset.ended = this.reason || "failed";
    this.failure.hidden = !failure;
    this.failure.textContent = failure || "";
    this.actions.hidden = false;
    this.redraw();
  }
}

export function keepAtEnd(change) {
  const box = byId("scroller");
  const follows = box.scrollHeight - box.scrollTop - box.clientHeight < NEAR_END;
  change();
  if (follows) box.scrollTop = box.scrollHeight;
}
