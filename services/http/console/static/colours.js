// Colours of the style sheet as numbers, and a colour per request. They change with the theme.

const scratch = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
const OWNERS = 36;
let named = new Map();
let owners = [];

/** Returns a colour of the style sheet, for example "prefill", as text. */
export function colour(name) {
  let found = named.get(name);
  if (!found) named.set(name, (found = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim()));
  return found;
}

/** Returns a colour as the number that pixels of `ImageData` have, read as 32 bits. */
export function pixel(text) {
  scratch.fillStyle = text;
  scratch.fillRect(0, 0, 1, 1);
  return new Uint32Array(scratch.getImageData(0, 0, 1, 1).data.buffer)[0];
}

/** Returns the pixel of a request's blocks; requests that follow each other differ clearly. */
export function ownerPixel(number) {
  if (!owners.length) {
    for (let index = 0; index < OWNERS; index += 1) {
      owners.push(pixel(`hsl(${(index * 137.5) % 360} ${55 + (index % 3) * 12}% ${44 + (index % 4) * 6}%)`));
    }
  }
  return owners[number % OWNERS];
}

/** Forgets all colours, because the theme has changed. */
export function themeChanged() {
  named = new Map();
}
