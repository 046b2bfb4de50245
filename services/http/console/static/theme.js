// Light, dark, or as the system says.

import { themeChanged } from "./colours.js";

const KEY = "quire-theme";
const CHOICES = ["system", "light", "dark"];

/** Lets a button choose the theme; calls `changed` when the colours are other ones. */
export function chooseTheme(button, changed) {
  const apply = (choice) => {
    if (choice === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = choice;
    button.textContent = `Theme: ${choice}`;
    themeChanged();
    changed();
  };
  let choice = localStorage.getItem(KEY) ?? "system";
  button.addEventListener("click", () => {
    choice = CHOICES[(CHOICES.indexOf(choice) + 1) % CHOICES.length];
    localStorage.setItem(KEY, choice);
    apply(choice);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => apply(choice));
  apply(choice);
}
