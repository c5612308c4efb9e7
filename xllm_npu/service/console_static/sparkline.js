// Small pictures of numbers, on a canvas, in the page's own colours.

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function prepared(canvas) {
  const scale = window.devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  if (!width || !height) return null;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  return { pen, width, height };
}

// `values` oldest first, at most `length`; null: nothing happened. The newest is at the right edge.
export function drawLine(canvas, values, { length, ceiling = 0, ink = "--accent", fill = true } = {}) {
  const area = prepared(canvas);
  if (!area) return;
  const { pen, width, height } = area;
  const top = Math.max(ceiling, ...values.map((value) => value || 0));
  const step = (width - 3) / (length - 1);
  const x = (i) => width - 3 - (values.length - 1 - i) * step; // room for the last one's dot
  const y = (value) => (top > 0 ? height - 1.5 - (height - 4) * (value / top) : height - 1.5);
  pen.strokeStyle = colour("--rule");
  pen.lineWidth = 1;
  pen.beginPath();
  pen.moveTo(0, height - 0.5);
  pen.lineTo(width, height - 0.5);
  pen.stroke();
  if (!values.length) return;
  pen.strokeStyle = colour(ink);
  pen.lineWidth = 1.5;
  pen.lineJoin = "round";
  let begun = false;
  const path = new Path2D();
  values.forEach((value, i) => {
    if (value === null) return; // the line goes on to the next one
    if (begun) path.lineTo(x(i), y(value));
    else path.moveTo(x(i), y(value));
    begun = true;
  });
  pen.stroke(path);
  if (fill && values.every((value) => value !== null)) {
    path.lineTo(x(values.length - 1), height);
    path.lineTo(x(0), height);
    pen.globalAlpha = 0.14;
    pen.fillStyle = colour(ink);
    pen.fill(path);
    pen.globalAlpha = 1;
  }
  let last = values.length - 1;
  while (last > 0 && values[last] === null) last -= 1;
  if (values[last] === null) return;
  pen.fillStyle = colour(ink);
  pen.beginPath();
  pen.arc(x(last), y(values[last]), 2.5, 0, 7);
  pen.fill();
}

// A field of cells of which a share is filled: one for each block, or as many as there is room for.
export function drawCells(canvas, blocks, share, shareMapped = 1) {
  const area = prepared(canvas);
  if (!area) return;
  const { pen, width, height } = area;
  const size = 11;
  const columns = Math.floor((width + 3) / (size + 3));
  const rows = Math.floor((height + 3) / (size + 3));
  const count = Math.min(columns * rows, blocks);
  const filled = share > 0 ? Math.max(1, Math.round(share * count)) : 0;
  const mapped = Math.round(shareMapped * count);
  for (let i = 0; i < count; i += 1) {
    const left = (i % columns) * (size + 3);
    const top = Math.floor(i / columns) * (size + 3);
    if (i < filled) {
      pen.fillStyle = colour("--accent");
      pen.fillRect(left, top, size, size);
    } else {
      pen.strokeStyle = colour(i < mapped ? "--muted" : "--rule");
      pen.strokeRect(left + 0.5, top + 0.5, size - 1, size - 1);
    }
  }
}
