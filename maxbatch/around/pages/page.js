"use strict";
// Draws the page's figures with BokehJS. Run figures share their runs' columns; the reader chooses the x axis, zoom goes
// along.
(async () => {
  if (!window.DecompressionStream) {
    for (const plot of document.querySelectorAll(".plot")) plot.textContent = "Plots need a browser of 2023 or newer.";
    return;
  }
  await unpack();
  Bokeh.logger.set_level("warn");
  const { runs, figures } = JSON.parse(document.getElementById("page-data").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const isPanel = (figure) => "lines" in figure;
  const windows = [1, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000]; // drawn updates that the slider takes the mean of
  const HOVER_PX = 40; // the farthest point that hovering shows
  const LINES = { line: {}, joined: {}, stairs: {}, faint: { line_width: 1, line_alpha: 0.35 }, dotted: { line_width: 1, line_dash: "dotted" } };
  const MARKERS = {
    points: { marker: "diamond", size: 12, line_color: "--text" },
    joined: { marker: "circle", size: 8 },
    dots: { marker: "circle", size: 8 },
    ...Object.fromEntries(Object.entries({ stars: "star", squares: "square", triangles: "triangle" }).map(([style, marker]) => [style, { marker, size: 13, line_color: "--text" }])),
    rings: { marker: "circle", size: 16, fill_color: null, line_width: 2 },
  };
  const isMark = ({ style }) => ["stars", "squares", "triangles"].includes(style);
  let axis = "steps";
  let smoothing = 1;
  let whole = { start: 0, end: 1 }; // range of x that shows every update
  let zoom = whole; // range of x that the run figures show

  // Runs the plotting library, which the page holds as base64 of gzip.
  async function unpack() {
    const packed = Uint8Array.from(atob(document.getElementById("bokeh").textContent), (one) => one.charCodeAt(0));
    const library = document.createElement("script");
    library.textContent = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
    document.head.append(library);
  }

  function css(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  }

  function textStyle(part) {
    return { [`${part}_text_color`]: css("--text"), [`${part}_text_font`]: "system-ui, sans-serif", [`${part}_text_font_size`]: "12px", [`${part}_text_font_style`]: "normal" };
  }

  // At each place the mean of the last `smoothing` values, of fewer at the start; null is left out.
  function smoothed(values) {
    let sum = 0, count = 0;
    return values.map((value, i) => {
      const gone = i >= smoothing ? values[i - smoothing] : null;
      if (value !== null) { sum += value; count += 1; }
      if (gone !== null) { sum -= gone; count -= 1; }
      return value === null ? null : sum / count;
    });
  }

  // The slider draws its mean over each line, which stays below it, exact and faint; where a panel has a faint line of
  // its own, its mean takes the place of the line above it.
  function seriesOf(line, figure) {
    const run = runs[line.run];
    const unitOfTime = figure.units.time.includes("hours") ? "h" : "s";
    const make = (column, style, name, y) => ({
      name, style, y, colour: run.colour, run: run.name, column, x: run.axes[axis],
      text: (i) => `${run.name}\n${name} ${isMark({ style }) ? "at " : ""}${y[i]}\nstep ${count(run.axes.steps[i])} · ${count(run.axes.samples[i])} samples · ` +
        `${count(run.axes.tokens[i])} tokens · ${short(run.axes.time[i])} ${unitOfTime}`,
    });
    const { column, style } = line;
    const exact = make(column, style, column, run.columns[column]);
    if (smoothing === 1 || !figure.smooths || style !== "line") return [exact];
    const faint = figure.lines.find((other) => other.run === line.run && other.style === "faint");
    const source = (faint ?? line).column;
    const over = make(source, "line", `${source}, mean of ${smoothing}`, smoothed(run.columns[source]));
    return faint ? [over] : [{ ...exact, style: "faint" }, over];
  }

  function count(number) {
    return number.toLocaleString("en");
  }

  function short(number) {
    return Number(number.toPrecision(4)).toString();
  }

  // Draws a series and returns the parts of it that the legend shows.
  function add(plot, { style, colour, x, y, errors = [] }) {
    const source = new Bokeh.ColumnDataSource({ data: { x, y: y.map((value) => value ?? NaN) } });
    const where = { source, x: { field: "x" }, y: { field: "y" } };
    const parts = [];
    if (style in LINES) {
      const look = { line_color: colour, line_width: 1.8, ...LINES[style] };
      parts.push(style === "stairs" ? plot.step({ ...where, ...look, mode: "before" }) : plot.line({ ...where, ...look }));
    }
    const marker = MARKERS[x.length === 1 && style in LINES ? "dots" : style];
    if (marker) {
      const look = { fill_color: colour, line_color: colour, ...marker };
      if (look.line_color.startsWith("--")) look.line_color = css(look.line_color);
      parts.push(plot.scatter({ ...where, ...look }));
    }
    const bars = errors.flatMap((error, i) => (error && y[i] !== null ? [[x[i], y[i] - error, y[i] + error]] : []));
    if (bars.length) {
      const [at, low, high] = [0, 1, 2].map((part) => bars.map((bar) => bar[part]));
      const ends = new Bokeh.ColumnDataSource({ data: { at, low, high } });
      const field = (name) => ({ field: name });
      parts.push(plot.segment({ source: ends, x0: field("at"), y0: field("low"), x1: field("at"), y1: field("high"), line_color: colour, line_width: 1.5 }));
      for (const end of ["low", "high"]) {
        parts.push(plot.scatter({ source: ends, x: field("at"), y: field(end), marker: "dash", size: 9, line_color: colour, line_width: 1.5 }));
      }
    }
    return parts;
  }

  // Shows the text of the nearest point, the value as it was written.
  function addHover(plot, series) {
    const points = series.flatMap(({ y }, s) => y.flatMap((value, i) => (value === null ? [] : [[s, i]])));
    const at = (axis) => points.map(([s, i]) => series[s][axis][i]);
    const source = new Bokeh.ColumnDataSource({ data: { x: at("x"), y: at("y") } });
    const hidden = { size: 1, hit_dilation: 2 * HOVER_PX, fill_color: null, line_color: null };
    const caught = plot.scatter({ source, x: { field: "x" }, y: { field: "y" }, ...hidden });
    addTooltips(plot, caught, (index) => {
      const [s, i] = points[index];
      return series[s].text(i);
    });
  }

  function addTooltips(plot, renderer, textOf) {
    const tooltips = (_, { index, indices, glyph_view: { sx: xs, sy: ys }, sx, sy }) => {
      const distance = (i) => (xs[i] - sx) ** 2 + (ys[i] - sy) ** 2;
      if (indices.some((other) => distance(other) < distance(index) || (distance(other) === distance(index) && other < index))) return null;
      const box = document.createElement("div"); // inside of a shadow, which page.css does not reach
      box.style = "margin: -5px; padding: .35rem .6rem; background: var(--card); color: var(--text)";
      const [first, ...rest] = textOf(index).split("\n");
      const name = document.createElement("b");
      name.textContent = first;
      box.append(name, ...rest.flatMap((line) => [document.createElement("br"), line]));
      return box;
    };
    plot.add_tools(new Bokeh.HoverTool({ renderers: [renderer], tooltips, show_arrow: false, visible: false }));
  }

  function addHeatMap(plot, { x: xTitle, y: yTitle, heatMap }) {
    const { name, x, y, values_YxX: values, palette, has_numbers: hasNumbers } = heatMap;
    const cells = y.flatMap((row, j) => x.flatMap((column, i) => (values[j][i] === null ? [] : [{ column, row, value: values[j][i] }])));
    const shown = cells.map(({ value }) => value);
    const isNumeric = typeof x[0] === "number";
    const width = isNumeric ? (x.length > 1 ? (x[x.length - 1] - x[0]) / (x.length - 1) : 1) : 0.97;
    const mapper = new Bokeh.LinearColorMapper(palette === "loads"
      ? { palette: Bokeh.Palettes.RdBu11, low: 0, high: 2 }
      : { palette: [...Bokeh.Palettes.Viridis256].reverse(), low: Math.min(...shown), high: Math.max(...shown) });
    const colour = { field: "value", transform: mapper };
    const source = new Bokeh.ColumnDataSource({ data: { x: cells.map(({ column }) => column), y: cells.map(({ row }) => row), value: shown, text: shown.map(short) } });
    const where = { source, x: { field: "x" }, y: { field: "y" } };
    const rects = plot.rect({ ...where, width, height: isNumeric ? 1 : 0.97, fill_color: colour, line_color: isNumeric ? colour : null });
    if (hasNumbers) {
      const isDark = (value) => value > (mapper.low + mapper.high) / 2; // the upper half of the palette
      source.data.ink = shown.map((value) => (isDark(value) ? "#fff" : "#222"));
      plot.text({ ...where, text: { field: "text" }, text_align: "center", text_baseline: "middle", text_color: { field: "ink" }, text_font_size: "12px" });
    }
    plot.add_layout(new Bokeh.ColorBar({ color_mapper: mapper, width: 12, padding: 4, background_fill_color: null, ...textStyle("major_label") }), "right");
    addTooltips(plot, rects, (index) => {
      const { column, row, value } = cells[index];
      return `${name} ${hasNumbers ? value : short(value)}\n${xTitle.title} ${isNumeric ? count(column) : column}\n${yTitle.title} ${row}`;
    });
  }

  // Ticks as people write them: 0.0001 and 3e-7 on a logarithmic axis too, where the library's have one count of decimals.
  function plainTicks() {
    const formatter = new Bokeh.BasicTickFormatter({ power_limit_low: -4, power_limit_high: 6 });
    const format = formatter.doFormat.bind(formatter);
    formatter.doFormat = (ticks, options) => ticks.some((tick) => Math.abs(tick) >= 1e5)
      ? format(ticks, options)
      : ticks.map((tick) => Number(tick.toPrecision(9)).toString().replace("-", "\u2212"));
    return formatter;
  }

  function emptyPlot({ x, y, isPanel = false, areLarge = false }) {
    const ranges = {};
    if (isPanel) ranges.x_range = new Bokeh.Range1d({ ...zoom, reset_start: whole.start, reset_end: whole.end });
    else if (x.kind === "category") ranges.x_range = new Bokeh.FactorRange({ factors: x.categories });
    if (y.kind === "category") ranges.y_range = new Bokeh.FactorRange({ factors: y.categories });
    const zoomTool = new Bokeh.BoxZoomTool({ dimensions: isPanel ? "width" : "auto" });
    const panTool = new Bokeh.PanTool({ dimensions: isPanel ? "width" : "both" });
    const kind = ({ kind }) => (kind === "category" ? "auto" : kind);
    const plot = Bokeh.Plotting.figure({
      ...ranges, x_axis_type: kind(x), y_axis_type: kind(y), x_axis_label: x.title, y_axis_label: y.title,
      tools: [zoomTool, panTool, new Bokeh.ResetTool(), new Bokeh.SaveTool()], toolbar_location: "above", toolbar_inner: true, sizing_mode: "stretch_both", window_axis: isPanel ? "x" : "none",
      background_fill_color: null, border_fill_color: null, outline_line_color: null, min_border: 0, min_border_right: 12,
      lod_threshold: null,
    });
    for (const [side, grid, { kind, ticks }] of [[plot.xaxis, plot.xgrid, x], [plot.yaxis, plot.ygrid, y]]) {
      side.axis_line_color = side.major_tick_line_color = css("--line");
      side.minor_tick_line_color = null;
      Object.assign(side, textStyle("major_label"), textStyle("axis_label"));
      // Stages that follow one another closely have ticks whose labels would lie over each other.
      if (Bokeh.NoOverlap) side.major_label_policy = new Bokeh.NoOverlap();
      if (ticks?.length) side.ticker = grid.ticker = new Bokeh.FixedTicker({ ticks });
      if (kind !== "category") side.formatter = plainTicks();
    }
    plot.toolbar.logo = null;
    plot.toolbar.autohide = true;
    plot.toolbar.stylesheets = [":host { background: none !important; }"];
    // A finger scrolls the page.
    plot.toolbar.active_drag = matchMedia("(pointer: coarse)").matches ? null : zoomTool;
    const large = () => new Bokeh.NumeralTickFormatter({ format: "0.[000]a" });
    if (isPanel) plot.xaxis.formatter = large();
    if (areLarge) plot.yaxis.formatter = large();
    plot.grid.grid_line_color = css("--line");
    return plot;
  }

  // As many names in a line as the figure is wide: a wider legend would widen the page.
  function addLegend(plot, entries, width) {
    if (entries.length < 2) return;
    const longest = Math.max(...entries.map(([label]) => label.length));
    const ncols = Math.max(1, Math.min(entries.length, Math.floor(width / (7 * longest + 44))));
    plot.add_layout(new Bokeh.Legend({
      items: entries.map(([label, renderers]) => new Bokeh.LegendItem({ label, renderers })), orientation: "horizontal", ncols,
      location: "top_left", click_policy: "hide", padding: 0, margin: 0, spacing: 14, border_line_color: null,
      background_fill_color: null, ...textStyle("label"), glyph_height: 14,
    }), "above");
  }

  async function draw(number) {
    const figure = figures[number];
    const series = isPanel(figure)
      ? figure.lines.flatMap((line) => seriesOf(line, figure))
      : figure.series.map((one) => ({ ...one, text: (i) => one.texts[i] }));
    const plot = isPanel(figure)
      ? emptyPlot({ x: { title: figure.units[axis] }, y: { title: figure.unit, kind: figure.isLog ? "log" : "linear" }, isPanel: true, areLarge: figure.areLarge })
      : emptyPlot(figure);
    const box = document.getElementById(`plot${number}`);
    const drawn = series.map((one) => [one, add(plot, one)]);
    if (figure.heatMap) addHeatMap(plot, figure);
    // A mark lies on its curve's point, whose text its own takes the place of.
    else addHover(plot, series.filter(({ texts }) => !texts || texts.length).sort((a, b) => isMark(b) - isMark(a)));
    // The names of several runs are beside the axis buttons.
    if (!isPanel(figure) || runs.length === 1) addLegend(plot, drawn.filter(([{ name }]) => name).map(([{ name }, parts]) => [name, parts]), box.clientWidth);
    box.view?.remove();
    box.replaceChildren();
    // An axis of one value goes from half of it to one and a half.
    if (plot.y_scale.type === "LinearScale") plot.y_range.default_span = series.flatMap(({ y }) => y).reduce((most, value) => Math.max(most, Math.abs(value ?? 0)), 0) || 2;
    box.series = series;
    box.plot = plot;
    plot.on_event("rangesupdate", ({ x0, x1 }) => isPanel(figure) && zoomTogether({ start: x0, end: x1 }));
    plot.on_event("doubletap", () => (isPanel(figure) ? panels() : [box]).forEach((each) => each.plot.reset.emit()));
    box.view = await Bokeh.Plotting.show(plot, box);
  }

  function drawAll(belong = () => true) {
    return Promise.all(figures.map((figure, number) => belong(figure) && draw(number)));
  }

  function panels() {
    return figures.flatMap((figure, number) => (isPanel(figure) ? [document.getElementById(`plot${number}`)] : []));
  }

  // Zooming one run figure zooms the others; the y axes fit what is shown.
  function zoomTogether(range) {
    zoom = range;
    for (const { plot } of panels()) {
      plot.y_range.have_updated_interactively = false; // the tool has set it too
      plot.x_range.setv(range);
    }
  }

  function takeAxis(name) {
    axis = name;
    const values = runs.flatMap(({ axes }) => axes[axis]);
    const low = values.reduce((a, b) => Math.min(a, b), Infinity), high = values.reduce((a, b) => Math.max(a, b), -Infinity);
    const margin = 0.02 * (high - low) || 0.5;
    if (values.length) zoom = whole = { start: low - margin, end: high + margin };
  }

  function press(buttons, pressed) {
    buttons.forEach((button) => button.setAttribute("aria-pressed", String(button === pressed)));
  }

  // Tables that are wider than the page say so.
  const mark = () => document.querySelectorAll(".scroll").forEach((box) => {
    box.toggleAttribute("data-scrolls", box.scrollWidth > box.clientWidth + 1);
  });
  mark();
  addEventListener("resize", mark);
  document.querySelectorAll("details").forEach((fold) => fold.addEventListener("toggle", mark));

  const axisButtons = [...document.querySelectorAll("[data-axis]")];
  axisButtons.forEach((button) => button.addEventListener("click", () => {
    takeAxis(button.dataset.axis);
    press(axisButtons, button);
    drawAll(isPanel);
  }));
  const slider = document.getElementById("smoothing");
  if (slider) slider.addEventListener("input", () => {
    smoothing = windows[Number(slider.value)];
    slider.nextElementSibling.value = smoothing === 1 ? "off" : `mean of ${smoothing}`;
    drawAll((figure) => isPanel(figure) && figure.smooths);
  });
  document.querySelectorAll("[data-log]").forEach((button) => button.addEventListener("click", () => {
    const figure = figures[button.dataset.log];
    figure.isLog = !figure.isLog;
    button.setAttribute("aria-pressed", String(figure.isLog));
    draw(button.dataset.log);
  }));
  dark.addEventListener("change", () => drawAll());
  takeAxis(axis);
  await drawAll();
  document.body.setAttribute("data-drawn", "true");
})();
