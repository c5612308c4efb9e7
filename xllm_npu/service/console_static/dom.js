// Elements without markup: text is only ever set as text, so that nothing a model says can become a tag.

export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name === "class") node.className = value;
    else if (name === "on") for (const [event, run] of Object.entries(value)) node.addEventListener(event, run);
    else if (name in node && typeof value !== "string") node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export const byId = (id) => document.getElementById(id);

export function announce(text) {
  byId("status").textContent = text;
}

export async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  // Pages from plain HTTP on another machine have no clipboard object.
  const box = el("textarea", { class: "hidden" });
  box.value = text;
  document.body.append(box);
  box.select();
  document.execCommand("copy");
  box.remove();
}

export function copyButton(textOf) {
  const button = el("button", { type: "button", class: "quiet" }, "Copy");
  button.addEventListener("click", async () => {
    await copyText(textOf());
    button.textContent = "Copied";
    announce("Copied");
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return button;
}
