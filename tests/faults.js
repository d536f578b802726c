// What tests/browser.py finds wrong with a page: everything unfolded, then measured. Gives a list of sentences.
async () => {
  for (const folded of document.querySelectorAll("details")) folded.open = true;
  const faults = new Set();
  const sources = new Map();
  for (const image of document.querySelectorAll("svg image")) {
    const source = Object.assign(new Image(), { src: image.href.baseVal });
    await source.decode();
    sources.set(image, source);
  }
  const wide = document.documentElement.clientWidth;

  // Colours: as the browser paints them, blended with what lies behind.
  const pixel = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const known = new Map();
  const colour = (text, filter = "none") => {
    const key = `${filter} ${text}`;
    if (!known.has(key)) {
      pixel.clearRect(0, 0, 1, 1);
      pixel.filter = filter;
      pixel.fillStyle = text;
      pixel.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = pixel.getImageData(0, 0, 1, 1).data;
      known.set(key, [r, g, b, a / 255]);
    }
    return known.get(key);
  };
  // What a style sheet does to all colours of a figure or a canvas.
  const filterOf = (element) => getComputedStyle(element.ownerSVGElement || element).filter;
  const over = ([r, g, b, a], [x, y, z]) => [r * a + x * (1 - a), g * a + y * (1 - a), b * a + z * (1 - a), 1];
  const linear = (c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const contrast = (one, other) => {
    const [low, high] = [light(one), light(other)].sort((x, y) => x - y);
    return (high + 0.05) / (low + 0.05);
  };
  const groundOf = (element) => {
    if (!element) return matchMedia("(prefers-color-scheme: dark)").matches ? [18, 18, 18, 1] : [255, 255, 255, 1];
    const own = colour(getComputedStyle(element).backgroundColor);
    return own[3] === 1 ? own : over(own, groundOf(element.parentElement));
  };
  const page = groundOf(document.body);
  const isDark = light(page) < 0.2;
  if (matchMedia("(prefers-color-scheme: dark)").matches && !isDark) faults.add("the page is not dark in the dark");

  // Words.
  const words = (element) => (element.textContent || element.getAttribute("alt") || "").trim().slice(0, 60);
  const say = (element, what) =>
    faults.add(`${what}: <${element.tagName.toLowerCase()} class="${element.getAttribute("class") || ""}"> ${words(element)}`);
  const seen = (element) => element.checkVisibility({ visibilityProperty: true }) && !element.closest("defs, clipPath, pattern");
  const scrolls = (element) =>
    element && element !== document.body && element !== document.documentElement &&
    (/auto|scroll/.test(getComputedStyle(element).overflowX) || scrolls(element.parentElement));
  const hasText = (element) => [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());

  // Rasters: the share of what is light, and the colour at a point.
  const pixels = new Map();
  const raster = (element) => {
    if (!pixels.has(element)) {
      const source = sources.get(element) || element;
      const [width, height] = [source.naturalWidth || source.width, source.naturalHeight || source.height];
      const drawn = Object.assign(document.createElement("canvas"), { width: width || 1, height: height || 1 }).getContext("2d");
      drawn.filter = filterOf(element);
      if (width) drawn.drawImage(source, 0, 0);
      pixels.set(element, drawn.getImageData(0, 0, width || 1, height || 1));
    }
    return pixels.get(element);
  };
  const at = (element, x, y) => {
    const local = new DOMPoint(x, y).matrixTransform(element.getScreenCTM().inverse());
    const [width, height] = [element.width.baseVal.value, element.height.baseVal.value];
    const [u, v] = [(local.x - element.x.baseVal.value) / width, (local.y - element.y.baseVal.value) / height];
    if (u < 0 || v < 0 || u >= 1 || v >= 1) return null;
    const data = raster(element);
    const place = 4 * (Math.floor(v * data.height) * data.width + Math.floor(u * data.width));
    const [r, g, b, a] = data.data.slice(place, place + 4);
    return [r, g, b, a / 255];
  };
  const isLight = (element) => {
    const { data } = raster(element);
    let sum = 0;
    for (let n = 0; n < data.length; n += 4) sum += light(over([data[n], data[n + 1], data[n + 2], data[n + 3] / 255], page));
    return sum / (data.length / 4) > 0.5;
  };

  // Boxes and text.
  if (document.documentElement.scrollWidth > wide) faults.add(`the page is ${document.documentElement.scrollWidth} pixels wide in ${wide}`);
  for (const element of document.body.querySelectorAll("*")) {
    if (element.ownerSVGElement || !seen(element) || element.matches("script, style, option")) continue;
    const box = element.getBoundingClientRect();
    const style = getComputedStyle(element);
    if (box.width < 2 || box.height < 2) continue;
    if ((box.right > wide + 1 || box.left < -1) && !scrolls(element.parentElement)) say(element, `leaves the window (${Math.round(box.left)} to ${Math.round(box.right)})`);
    const spills = element.clientWidth && element.scrollWidth > element.clientWidth + 1;
    if (spills && /hidden|clip/.test(style.overflowX)) say(element, "is cut off");
    if (spills && style.overflowX === "visible" && hasText(element)) say(element, "spills out of its box");
    if (hasText(element) && Number(style.opacity) > 0.5) {
      const size = parseFloat(style.fontSize);
      const enough = size >= 24 || (size >= 18.6 && style.fontWeight >= 600) ? 3 : 4.5;
      const ground = groundOf(element);
      const found = contrast(over(colour(style.color), ground), ground);
      if (found < enough) say(element, `contrast ${found.toFixed(2)}`);
    }
    const own = colour(style.backgroundColor);
    const isData = element.closest("[role=grid], [role=img], .scale");
    if (isDark && own[3] > 0.5 && light(own) > 0.3 && box.width * box.height > 150 && !isData) say(element, "has a light ground on a dark page");
    if (isDark && element.matches("img, canvas") && isLight(element)) say(element, "is a light picture on a dark page");
  }

  // Figures.
  for (const svg of document.querySelectorAll("svg")) {
    if (!seen(svg)) continue;
    const frame = svg.getBoundingClientRect();
    const [ground, filter] = [groundOf(svg), filterOf(svg)];
    const images = [...svg.querySelectorAll("image")].filter(seen);
    if (isDark) for (const image of images) if (isLight(image)) say(svg, "holds a light picture on a dark page");
    const cells = [...svg.querySelectorAll("rect")].filter(seen);
    const texts = [...svg.querySelectorAll("text")].filter((text) => seen(text) && text.textContent.trim());
    for (const text of texts) {
      const box = text.getBoundingClientRect();
      const [x, y] = [(box.left + box.right) / 2, (box.top + box.bottom) / 2];
      if (box.left < frame.left - 2 || box.right > frame.right + 2 || box.top < frame.top - 2 || box.bottom > frame.bottom + 2) say(text, "leaves its figure");
      const cell = cells.filter((rect) => {
        const frame = rect.getBoundingClientRect();
        return frame.left <= x && x <= frame.right && frame.top <= y && y <= frame.bottom;
      }).map((rect) => getComputedStyle(rect).fill).filter((fill) => /^(rgb|color|oklab)/.test(fill)).map((fill) => colour(fill, filter));
      const below = [...images.map((image) => at(image, x, y)), ...cell].filter((found) => found && found[3] > 0).pop();
      const behind = below ? over(below, ground) : ground;
      const found = contrast(over(colour(getComputedStyle(text).fill, filter), behind), behind);
      if (found < (below ? 3 : 4.5)) say(text, `contrast ${found.toFixed(2)} in a figure`);
    }
    for (const line of svg.querySelectorAll("path, line, polyline, use, circle, rect")) {
      const style = getComputedStyle(line);
      if (!seen(line) || style.stroke === "none" || parseFloat(style.strokeWidth) < 1) continue;
      if (style.strokeOpacity * style.opacity < 0.5) continue;
      const found = contrast(over(colour(style.stroke, filter), ground), ground);
      // What has the ground's own colour is a halo.
      if (found > 1.05 && found < 3) say(svg, `a line ${style.stroke} of contrast ${found.toFixed(2)}`);
    }
    const upright = texts.filter((text) => !/rotate\((?!-?(0|90)\b)/.test(text.getAttribute("transform") || ""));
    const boxes = upright.map((text) => text.getBoundingClientRect());
    for (let n = 0; n < boxes.length; n++)
      for (let m = 0; m < n; m++) {
        const [one, other] = [boxes[n], boxes[m]];
        const across = Math.min(one.right, other.right) - Math.max(one.left, other.left);
        const down = Math.min(one.bottom, other.bottom) - Math.max(one.top, other.top);
        if (across > 2 && down > 0.4 * Math.min(one.height, other.height)) say(upright[n], `overlaps ${JSON.stringify(words(upright[m]))} in a figure`);
      }
  }
  return [...faults].slice(0, 25);
}
