// Markdown as models write it, to DOM nodes: headings, paragraphs, lists, quotes, fences, tables, rules, and inline
// emphasis, code, links. Tags in the text stay text. Links go to http, https and mailto only, and pictures become
// links: a model's answer must not make the browser ask anybody for anything.
//
// Every scan is bounded: a delimiter whose closing partner was sought in vain is not sought again in that text.

import { copyButton, el } from "./dom.js";

const MAX_DEPTH = 8; // of nested lists and quotes; deeper ones are flat
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const DIVIDER = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;

// Blocks as [kind, lines, ...]: a block's source tells whether it has to be drawn anew.
export function blocksOf(text) {
  const lines = text.replace(/\r\n?/g, "\n").split("\n");
  const blocks = [];
  let i = 0;
  const paragraphEnds = (line) => !line.trim() || FENCE.test(line) || HEADING.test(line) || RULE.test(line)
    || QUOTE.test(line) || ITEM.test(line);
  while (i < lines.length) {
    const line = lines[i];
    const begin = i;
    const fence = FENCE.exec(line);
    const heading = HEADING.exec(line);
    if (!line.trim()) {
      i += 1;
      continue;
    }
    if (fence) {
      const closing = new RegExp(`^ {0,3}\\${fence[1][0]}{${fence[1].length},}\\s*$`);
      i += 1;
      while (i < lines.length && !closing.test(lines[i])) i += 1;
      const body = lines.slice(begin + 1, i);
      if (i < lines.length) i += 1;
      blocks.push({ kind: "code", language: fence[2], body: body.join("\n"), source: lines.slice(begin, i).join("\n") });
      continue;
    }
    if (heading) {
      i += 1;
      blocks.push({ kind: "heading", level: heading[1].length, body: heading[2].replace(/\s+#+\s*$/, ""), source: line });
      continue;
    }
    if (RULE.test(line)) {
      i += 1;
      blocks.push({ kind: "rule", source: line });
      continue;
    }
    if (QUOTE.test(line)) {
      while (i < lines.length && QUOTE.test(lines[i])) i += 1;
      const source = lines.slice(begin, i);
      blocks.push({ kind: "quote", body: source.map((one) => QUOTE.exec(one)[1]).join("\n"), source: source.join("\n") });
      continue;
    }
    if (ITEM.test(line)) {
      i = endOfList(lines, i);
      blocks.push({ kind: "list", lines: lines.slice(begin, i), source: lines.slice(begin, i).join("\n") });
      continue;
    }
    if (line.includes("|") && i + 1 < lines.length && lines[i + 1].includes("-") && DIVIDER.test(lines[i + 1])) {
      i += 2;
      while (i < lines.length && lines[i].trim() && lines[i].includes("|")) i += 1;
      blocks.push({ kind: "table", lines: lines.slice(begin, i), source: lines.slice(begin, i).join("\n") });
      continue;
    }
    i += 1;
    while (i < lines.length && !paragraphEnds(lines[i])) i += 1;
    blocks.push({ kind: "paragraph", body: lines.slice(begin, i).join("\n"), source: lines.slice(begin, i).join("\n") });
  }
  return blocks;
}

const isOrdered = (marker) => /\d/.test(marker);
const indentOf = (line) => line.length - line.trimStart().length;

// After the last line that belongs to the list at `begin`: items, what is indented below them, blank lines between.
function endOfList(lines, begin) {
  const base = indentOf(lines[begin]);
  const ordered = isOrdered(ITEM.exec(lines[begin])[2]);
  let end = begin + 1;
  for (let i = begin + 1; i < lines.length; i += 1) {
    const line = lines[i];
    if (!line.trim()) continue;
    const blankBefore = !lines[i - 1].trim();
    const item = ITEM.exec(line);
    if (item && indentOf(line) <= base && isOrdered(item[2]) !== ordered) break;
    if (indentOf(line) > base || item || (!blankBefore && !HEADING.test(line) && !FENCE.test(line))) end = i + 1;
    else break;
  }
  return end;
}

function listOf(lines, depth) {
  const base = indentOf(lines[0]);
  const items = [];
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && indentOf(line) <= base + 1) items.push({ marker: item[2], lines: [item[3]], shift: line.length - item[3].length });
    else items[items.length - 1].lines.push(line.slice(Math.min(indentOf(line), items[items.length - 1].shift)));
  }
  const ordered = isOrdered(items[0].marker);
  const list = el(ordered ? "ol" : "ul");
  if (ordered) list.start = Number.parseInt(items[0].marker, 10);
  for (const item of items) {
    const inner = blocksOf(item.lines.join("\n"));
    const entry = el("li");
    inner.forEach((block) => {
      if (block.kind === "paragraph" && inner.filter((one) => one.kind === "paragraph").length === 1) {
        entry.append(...inline(block.body));
      } else entry.append(nodeOf(block, depth + 1));
    });
    list.append(entry);
  }
  return list;
}

function cellsOf(line) {
  const cells = [];
  let cell = "";
  const inside = line.trim().replace(/^\|/, "").replace(/\|$/, "");
  for (let i = 0; i < inside.length; i += 1) {
    if (inside[i] === "\\" && inside[i + 1] === "|") { cell += "|"; i += 1; } else if (inside[i] === "|") { cells.push(cell.trim()); cell = ""; } else cell += inside[i];
  }
  return [...cells, cell.trim()];
}

function tableOf(lines) {
  const columns = cellsOf(lines[1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : ""));
  const row = (line, tag) => el("tr", {}, ...cellsOf(line).slice(0, columns.length).map((cell, i) => {
    const node = el(tag, {}, ...inline(cell));
    if (columns[i]) node.className = columns[i];
    return node;
  }));
  return el("div", { class: "table" }, el("table", {}, el("thead", {}, row(lines[0], "th")),
    el("tbody", {}, ...lines.slice(2).map((line) => row(line, "td")))));
}

function codeOf(block) {
  const head = el("div", { class: "code-head" }, el("span", {}, block.language || "text"), copyButton(() => block.body));
  return el("div", { class: "code" }, head, el("pre", { tabindex: "0" }, el("code", {}, block.body)));
}

function nodeOf(block, depth) {
  if (depth > MAX_DEPTH) return el("p", {}, block.source);
  switch (block.kind) {
    case "code": return codeOf(block);
    case "heading": return el(`h${Math.min(6, block.level + 2)}`, {}, ...inline(block.body));
    case "rule": return el("hr");
    case "quote": return el("blockquote", {}, ...blocksOf(block.body).map((one) => nodeOf(one, depth + 1)));
    case "list": return listOf(block.lines, depth);
    case "table": return tableOf(block.lines);
    default: return el("p", {}, ...inline(block.body));
  }
}

export function safeTarget(target) {
  const text = target.trim();
  return /^(https?:\/\/|mailto:)[^\s\u0000-\u001f\\]+$/i.test(text) ? text : "";
}

function linkTo(target, children) {
  const safe = safeTarget(target);
  return safe ? [el("a", { href: safe, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children)] : children;
}

const MARKS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];
const isWord = (letter) => letter !== undefined && /[\p{L}\p{N}_]/u.test(letter);

export function inline(text, depth = 0) {
  const nodes = [];
  let plain = "";
  const hopeless = new Set(); // delimiters without a partner from here on
  const flush = () => {
    if (plain) nodes.push(document.createTextNode(plain));
    plain = "";
  };
  for (let i = 0; i < text.length;) {
    const letter = text[i];
    if (letter === "\\" && /[\\`*_{}[\]()#+\-.!|~>]/.test(text[i + 1] || "")) {
      plain += text[i + 1];
      i += 2;
      continue;
    }
    if (letter === "`") {
      const ticks = /^`+/.exec(text.slice(i, i + 8))[0];
      const end = hopeless.has(ticks) ? -1 : text.indexOf(ticks, i + ticks.length);
      if (end > 0) {
        flush();
        nodes.push(el("code", {}, text.slice(i + ticks.length, end).replace(/\n/g, " ")));
        i = end + ticks.length;
      } else {
        hopeless.add(ticks);
        plain += ticks;
        i += ticks.length;
      }
      continue;
    }
    if (letter === "\n") {
      const broken = plain.endsWith("  ");
      plain = plain.trimEnd();
      if (broken) {
        flush();
        nodes.push(el("br"));
      } else plain += "\n";
      i += 1;
      continue;
    }
    const link = (letter === "[" || text.startsWith("![", i)) && !hopeless.has("](") ? linkAt(text, i, depth) : null;
    if (link) {
      flush();
      nodes.push(...link.nodes);
      i = link.end;
      continue;
    }
    if (letter === "[" && text.indexOf("](", i) < 0) hopeless.add("](");
    const bare = letter === "h" && !isWord(text[i - 1]) ? /^https?:\/\/[^\s<>"'`\\]{1,2000}/.exec(text.slice(i, i + 2010)) : null;
    if (bare) {
      const target = bare[0].replace(/[.,;:!?)\]*_~]+$/, "");
      flush();
      nodes.push(...linkTo(target, [target]));
      i += target.length;
      continue;
    }
    const mark = depth < 4 ? markAt(text, i, hopeless) : null;
    if (mark) {
      flush();
      nodes.push(el(mark.tag, {}, ...inline(text.slice(mark.from, mark.to), depth + 1)));
      i = mark.to + mark.width;
      continue;
    }
    plain += letter;
    i += 1;
  }
  flush();
  return nodes;
}

function markAt(text, i, hopeless) {
  for (const [mark, tag] of MARKS) {
    if (!text.startsWith(mark, i) || hopeless.has(mark)) continue;
    const from = i + mark.length;
    if (/\s/.test(text[from] || " ") || (mark[0] === "_" && isWord(text[i - 1]))) return null;
    let to = text.indexOf(mark, from + 1);
    while (to > 0) {
      const whole = mark.length === 2 || (text[to - 1] !== mark && text[to + 1] !== mark);
      if (whole && !/\s/.test(text[to - 1]) && !(mark[0] === "_" && isWord(text[to + mark.length]))) {
        return { tag, from, to, width: mark.length };
      }
      to = to - from > 4000 ? -1 : text.indexOf(mark, to + 1);
    }
    hopeless.add(mark);
  }
  return null;
}

function linkAt(text, i, depth) {
  const picture = text[i] === "!";
  const begin = i + (picture ? 2 : 1);
  const middle = text.indexOf("](", begin);
  if (middle < 0 || middle - begin > 1000 || text.slice(begin, middle).includes("\n\n")) return null;
  const end = text.indexOf(")", middle + 2);
  if (end < 0 || end - middle > 2000) return null;
  const target = text.slice(middle + 2, end).replace(/\s+"[^"]*"$/, "");
  const label = text.slice(begin, middle);
  const children = depth < 4 ? inline(label, 4) : [label];
  return { nodes: linkTo(target, children.length ? children : [target]), end: end + 1 };
}

// Draws a text that grows: blocks that are as they were stay as they are (and with them a selection, a scroll).
export class MarkdownView {
  constructor(node) {
    this.node = node;
    this.sources = [];
  }

  draw(text) {
    const blocks = blocksOf(text);
    let same = 0;
    while (same < blocks.length && same < this.sources.length && blocks[same].source === this.sources[same]) same += 1;
    while (this.node.childNodes.length > same) this.node.lastChild.remove();
    this.node.append(...blocks.slice(same).map((block) => nodeOf(block, 0)));
    this.sources = blocks.map((block) => block.source);
  }
}
