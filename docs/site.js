// What the theme leaves out for keyboards and screen readers: wide tables and code can be scrolled without a mouse, and
// the buttons beside code are no landmarks of the page. The dialog for searching has a name. Parts of a page's table of
// contents are no landmarks either: their headings may repeat.
function complete() {
  for (const table of document.querySelectorAll(".md-typeset__scrollwrap:not([tabindex])")) {
    table.tabIndex = 0;
    table.setAttribute("role", "group");
    table.setAttribute("aria-label", "Table");
  }
  // Only what scrolls: on a desktop, hardly any.
  for (const code of document.querySelectorAll("pre > code:not([tabindex])")) {
    if (code.scrollWidth > code.clientWidth) code.tabIndex = 0;
  }
  for (const dialog of document.querySelectorAll(".md-search:not([aria-label])")) {
    dialog.setAttribute("aria-label", "Search");
  }
  for (const part of document.querySelectorAll(".md-nav--secondary nav:not([role])")) {
    part.setAttribute("role", "none");
    part.removeAttribute("aria-label");
  }
  for (const buttons of document.querySelectorAll("nav.md-code__nav:not([role])")) {
    buttons.setAttribute("role", "none");
  }
}

addEventListener("resize", complete);
new MutationObserver(complete).observe(document.documentElement, { childList: true, subtree: true });
