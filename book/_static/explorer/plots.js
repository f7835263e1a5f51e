"use strict";
// The wave, the shares below it, and the CKA map, drawn for the width at hand so that text keeps its size.
(function (Elsi) {
  const { svg } = Elsi.dom;
  const LEFT = 52;
  const RIGHT = 14;
  const CIVIDIS = ["00224e", "123570", "3b496c", "575d6d", "707173", "8a8678", "a59c74", "c3b369", "e1cc55", "fee838"].map((hex) =>
    [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16)),
  );

  /** A colour for 0 to 1: cividis, which colour-blind readers see as everyone does. */
  function colour(share) {
    const at = Math.min(Math.max(share, 0), 1) * (CIVIDIS.length - 1);
    const low = Math.min(Math.floor(at), CIVIDIS.length - 2);
    return `rgb(${CIVIDIS[low].map((value, i) => Math.round(value + (at - low) * (CIVIDIS[low + 1][i] - value))).join(" ")})`;
  }

  const images = new WeakMap();

  /** Rows of values as an image of one pixel each, which the browser enlarges: thousands of rectangles would be slow. */
  function picture(rows, floor, x, y, width, height) {
    if (!images.has(rows)) {
      const canvas = Elsi.dom.html("canvas", { width: rows[0].length, height: rows.length });
      const context = canvas.getContext("2d");
      rows.forEach((row, i) =>
        row.forEach((value, j) => {
          context.fillStyle = colour((value - floor) / (1 - floor));
          context.fillRect(j, i, 1, 1);
        }),
      );
      images.set(rows, canvas.toDataURL());
    }
    return svg("image", { href: images.get(rows), x, y, width, height, preserveAspectRatio: "none", class: "picture" });
  }

  const BAR = Array.from({ length: 40 }, (_, i) => [1 - (i + 0.5) / 40]);

  /** Round steps from 0 up to `top`, about `count` of them. */
  function ticks(top, count) {
    const rough = top / count;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((k) => k * power).find((k) => k >= rough);
    return Array.from({ length: Math.floor(top / step + 1e-9) + 1 }, (_, i) => i * step);
  }

  const layerTicks = (n, width) => ticks(n - 1, Math.max(2, Math.min(10, Math.floor(width / 50)))).filter(Number.isInteger);
  const short = (value) => String(Number(value.toPrecision(3)));
  const text = (x, y, content, attributes = {}) => svg("text", { x, y, ...attributes }, content);
  const line = (x1, y1, x2, y2, name) => svg("line", { x1, y1, x2, y2, class: name });

  function layerScale(n, width) {
    const inner = width - LEFT - RIGHT;
    return (j) => LEFT + ((j + 0.5) * inner) / n;
  }

  function frame(width, height, label) {
    return svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label, class: "elsi-plot" });
  }

  function layerAxis(plot, n, width, bottom, label) {
    const x = layerScale(n, width);
    plot.append(line(LEFT, bottom, width - RIGHT, bottom, "axis"));
    for (const j of layerTicks(n, width)) {
      plot.append(line(x(j), bottom, x(j), bottom + 4, "axis"), text(x(j), bottom + 17, String(j), { "text-anchor": "middle" }));
    }
    if (label) plot.append(text((LEFT + width - RIGHT) / 2, bottom + 36, "decoder block j (0-based)", { "text-anchor": "middle" }));
  }

  function valueAxis(plot, y, values, top, bottom, label, format) {
    for (const value of values) {
      plot.append(text(LEFT - 8, y(value) + 4, format(value), { "text-anchor": "end" }));
    }
    const middle = (top + bottom) / 2;
    plot.append(text(13, middle, label, { "text-anchor": "middle", transform: `rotate(-90 13 ${middle})` }));
  }

  /** One invisible column per layer that takes the click and names the layer. */
  function columns(plot, n, width, top, bottom, title) {
    const step = (width - LEFT - RIGHT) / n;
    for (let j = 0; j < n; j++) {
      const hit = svg("rect", { x: LEFT + j * step, y: top, width: step, height: bottom - top, class: "hit", "data-layer": j });
      hit.append(svg("title", {}, title(j)));
      plot.append(hit);
    }
  }

  Elsi.plots = {
    /** S of each layer along depth; `chosen` and `optimum` are marked. */
    wave(width, { wave, chosen, optimum, symbol, target }) {
      const height = 270;
      const top = 40;
      const bottom = height - 44;
      const n = wave.length;
      const x = layerScale(n, width);
      const highest = Math.max(...wave, 1e-9);
      const limit = 1.08 * highest;
      const y = (value) => bottom - (value / limit) * (bottom - top);
      const peak = wave.indexOf(highest);
      const plot = frame(
        width,
        height,
        `${symbol} of each single layer of ${target} along depth, from 0 to ${highest.toFixed(2)} nats, highest at layer ${peak}; ` +
          `marked are the chosen layers ${chosen.join(", ") || "none"}`,
      );
      for (const value of ticks(limit, 4)) plot.append(line(LEFT, y(value), width - RIGHT, y(value), "grid"));
      valueAxis(plot, y, ticks(limit, 4), top, bottom, `${symbol} of one layer (nats)`, short);
      layerAxis(plot, n, width, bottom, true);
      const middle = x(Math.floor(n / 2) - 0.5);
      plot.append(line(middle, top - 8, middle, bottom, "midpoint"), text(middle, 11, "midpoint, N/2", { "text-anchor": "middle", class: "muted" }));
      for (const j of chosen) plot.append(line(x(j), bottom, x(j), y(wave[j]), "stem"));
      plot.append(svg("path", { d: wave.map((value, j) => `${j ? "L" : "M"}${x(j).toFixed(1)} ${y(value).toFixed(1)}`).join(""), class: "wave" }));
      wave.forEach((value, j) => plot.append(svg("circle", { cx: x(j), cy: y(value), r: width < 420 ? 2 : 3, class: "layer" })));
      for (const j of optimum ?? []) {
        const at = `${x(j).toFixed(1)} ${y(wave[j]).toFixed(1)}`;
        plot.append(svg("path", { d: "M0 -8L8 0L0 8L-8 0Z", transform: `translate(${at})`, class: "optimum" }));
      }
      let before = -Infinity;
      let level = 0;
      for (const j of chosen) {
        level = x(j) - before < 18 ? (level + 1) % 3 : 0;
        before = x(j);
        plot.append(svg("circle", { cx: x(j), cy: y(wave[j]), r: 5, class: "chosen" }));
        plot.append(text(x(j), y(wave[j]) - 10 - 12 * level, String(j), { "text-anchor": "middle", class: "chosen-label" }));
      }
      columns(plot, n, width, 0, bottom, (j) => `layer ${j}: ${wave[j].toFixed(4)} nats${chosen.includes(j) ? ", chosen" : ""}`);
      return plot;
    },

    /** Share of the bootstrap replicates that choose each layer. */
    shares(width, { layerShare, chosen, replicates }) {
      const height = 128;
      const top = 10;
      const bottom = height - 44;
      const n = layerShare.length;
      const x = layerScale(n, width);
      const y = (value) => bottom - value * (bottom - top);
      const told = layerShare.map((share, j) => [share, j]).filter(([share]) => share > 0).sort((a, b) => b[0] - a[0]);
      const words = told.slice(0, 6).map(([share, j]) => `layer ${j} in ${Math.round(100 * share)} %`);
      const plot = frame(width, height, `Share of ${replicates} bootstrap replicates that choose each layer: ${words.join(", ")}`);
      for (const value of [0.5, 1]) plot.append(line(LEFT, y(value), width - RIGHT, y(value), "grid"));
      valueAxis(plot, y, [0, 0.5, 1], top, bottom, "% of redraws", (value) => String(100 * value));
      layerAxis(plot, n, width, bottom, true);
      const wide = Math.max(2, ((width - LEFT - RIGHT) / n) * 0.7);
      layerShare.forEach((share, j) => {
        const name = chosen.includes(j) ? "bar chosen" : "bar";
        plot.append(svg("rect", { x: x(j) - wide / 2, y: y(share), width: wide, height: bottom - y(share), class: name }));
      });
      columns(plot, n, width, 0, bottom, (j) => `layer ${j}: ${(100 * layerShare[j]).toFixed(1)} % of the replicates`);
      return plot;
    },

    /** CKA between all pairs of layers, with its compartments and the chosen pairs. */
    map(width, { M, compartments, chosen, estimator, target }) {
      const n = M.length;
      const top = 14;
      const left = LEFT - 6;
      const bar = 62;
      const size = Math.min(width - left - bar, 400);
      const cell = size / n;
      const height = top + size + 44;
      const lowest = Math.min(...M.flatMap((row) => [...row]));
      const floor = Math.min(Math.floor(lowest * 10) / 10, 0.9);
      const runs = compartments.map(([first, last]) => (first === last ? `${first}` : `${first} to ${last}`)).join("; ");
      const plot = frame(left + size + bar, height, `Map of the ${estimator} linear CKA between all pairs of layers of ${target}, from ${lowest.toFixed(2)} to 1; compartments: ${runs}`);
      plot.append(picture(M, floor, left, top, size, size), picture(BAR, 0, left + size + 14, top, 14, size));
      for (const [first] of compartments.slice(1)) {
        const at = first * cell;
        for (const name of ["edge-under", "edge"]) {
          plot.append(line(left, top + at, left + size, top + at, name), line(left + at, top, left + at, top + size, name));
        }
      }
      for (const i of chosen) {
        for (const j of chosen) {
          for (const name of ["pair-under", "pair"]) {
            plot.append(svg("rect", { x: left + j * cell, y: top + i * cell, width: cell, height: cell, class: name }));
          }
        }
        const at = (i + 0.5) * cell;
        plot.append(svg("path", { d: `M${left + at} ${top - 1}l-5 -9h10z`, class: "pointer" }), svg("path", { d: `M${left - 1} ${top + at}l-9 -5v10z`, class: "pointer" }));
      }
      for (const j of layerTicks(n, size)) {
        const at = (j + 0.5) * cell;
        plot.append(text(left + at, top + size + 16, String(j), { "text-anchor": "middle" }));
        if (chosen.every((other) => Math.abs(other - j) * cell > 13)) plot.append(text(left - 8, top + at + 4, String(j), { "text-anchor": "end" }));
      }
      for (const j of chosen) {
        if (chosen.some((other) => other < j && (j - other) * cell < 13)) continue;
        plot.append(text(left - 13, top + (j + 0.5) * cell + 4, String(j), { "text-anchor": "end", class: "chosen-label" }));
      }
      plot.append(text(left + size / 2, top + size + 36, "decoder block j (0-based)", { "text-anchor": "middle" }));
      plot.append(text(10, top + size / 2, "decoder block i", { "text-anchor": "middle", transform: `rotate(-90 10 ${top + size / 2})` }));
      for (const value of [1, (1 + floor) / 2, floor]) {
        const at = top + size * (1 - (value - floor) / (1 - floor));
        plot.append(text(left + size + 32, Math.min(Math.max(at + 4, top + 10), top + size), short(value).replace("-", "\u2212")));
      }
      plot.append(text(left + size + 14, top + size + 16, "CKA"));
      /** Layers under the pointer, or null. */
      plot.pairAt = (event) => {
        const box = plot.getBoundingClientRect();
        const [j, i] = [(event.clientX - box.left - left) / cell, (event.clientY - box.top - top) / cell].map(Math.floor);
        return i >= 0 && j >= 0 && i < n && j < n ? [i, j] : null;
      };
      return plot;
    },
  };
})(globalThis.Elsi);
