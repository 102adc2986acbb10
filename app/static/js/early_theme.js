// Runs before the first paint, so that a chosen theme does not flash the other one. Everything else is a module.
try {
  const chosen = localStorage.getItem("trunkline.theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // Storage is blocked: the system's scheme holds.
}
