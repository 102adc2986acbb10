/** Light or dark: the system's scheme, unless the person chose the other one. */

const KEY = "trunkline.theme";
const systemDark = matchMedia("(prefers-color-scheme: dark)");

export function currentTheme() {
  return document.documentElement.dataset.theme ?? (systemDark.matches ? "dark" : "light");
}

/** Shows the other theme. Choosing what the system says anyway goes back to following it. */
export function toggleTheme(storage) {
  const theme = currentTheme() === "dark" ? "light" : "dark";
  const root = document.documentElement;
  if (theme === (systemDark.matches ? "dark" : "light")) {
    delete root.dataset.theme;
    storage?.removeItem(KEY);
  } else {
    root.dataset.theme = theme;
    storage?.setItem(KEY, theme);
  }
}

export function onSystemTheme(listener) {
  systemDark.addEventListener("change", listener);
}
