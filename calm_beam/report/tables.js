// Tables whose heads sort their rows: by number where cells have one, else by text. Empty cells come last either way.

{
  const order = new Intl.Collator("en", { numeric: true });

  function isEmpty(cell) {
    return cell.textContent.trim() === "";
  }

  function compared(one, other) {
    if ("value" in one.dataset && "value" in other.dataset) return Number(one.dataset.value) - Number(other.dataset.value);
    return order.compare(one.textContent, other.textContent);
  }

  function sortBy(table, column) {
    const heads = [...table.tHead.rows[0].cells];
    const isDown = heads[column].getAttribute("aria-sort") === "ascending";
    for (const head of heads) head.removeAttribute("aria-sort");
    heads[column].setAttribute("aria-sort", isDown ? "descending" : "ascending");
    const rows = [...table.tBodies[0].rows].sort((one, other) => {
      const [left, right] = [one.cells[column], other.cells[column]];
      if (isEmpty(left) || isEmpty(right)) return isEmpty(left) - isEmpty(right);
      return isDown ? compared(right, left) : compared(left, right);
    });
    table.tBodies[0].append(...rows);
  }

  for (const table of document.querySelectorAll("table.sortable")) {
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.className = "sort";
      button.append(...head.childNodes);
      button.addEventListener("click", () => sortBy(table, column));
      head.append(button);
    });
  }
}
