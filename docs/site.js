// What the theme leaves out for keyboards and screen readers: wide tables can be scrolled without a mouse, and the
// buttons beside code are no landmarks of the page.
function complete() {
  for (const table of document.querySelectorAll(".md-typeset__scrollwrap:not([tabindex])")) {
    table.tabIndex = 0;
    table.setAttribute("role", "group");
    table.setAttribute("aria-label", "Table");
  }
  for (const buttons of document.querySelectorAll("nav.md-code__nav:not([role])")) {
    buttons.setAttribute("role", "none");
  }
}

new MutationObserver(complete).observe(document.documentElement, { childList: true, subtree: true });
