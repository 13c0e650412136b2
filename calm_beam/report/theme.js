// The switch between light and dark; until it is pressed, the page follows the system.

{
  const button = document.getElementById("theme");
  button.hidden = false;
  button.addEventListener("click", () => {
    const root = document.documentElement;
    const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = isDark ? "light" : "dark";
  });
}
