// Long tables become sortable and searchable; without a script they stay as they are. The library comes from the book
// itself, and only pages with such a table load it.
(() => {
  const library = new URL("itables.js", document.currentScript.src).href;

  const load = () =>
    new Promise((resolve, reject) => {
      const script = document.createElement("script");
      script.src = library;
      script.onload = () => resolve(window.qsaTableLibrary);
      script.onerror = () => reject(new Error(`cannot load ${library}`));
      document.head.append(script);
    });

  const upgrade = (DataTable, table) => {
    const scroll = table.closest(".qsa-scroll");
    new DataTable(table, {
      paging: false,
      autoWidth: false,
      order: [],
      layout: { topStart: "search", topEnd: "info", bottomStart: null, bottomEnd: null },
      language: {
        search: "Filter rows",
        info: "_TOTAL_ rows",
        infoEmpty: "no row",
        infoFiltered: "of _MAX_",
        zeroRecords: "no row holds these words",
        aria: { orderable: ": sort by this column", orderableReverse: ": sort the other way", orderableRemove: ": original order" },
      },
    });
    // outside of the box that scrolls, so that they stay in sight
    const tools = document.createElement("div");
    tools.className = "qsa-table-tools";
    tools.append(...scroll.querySelectorAll(".dt-search, .dt-info"));
    scroll.before(tools);
  };

  document.addEventListener("DOMContentLoaded", async () => {
    const tables = document.querySelectorAll("table.qsa-sortable");
    if (!tables.length) return;
    const { default: DataTable } = await load();
    tables.forEach((table) => upgrade(DataTable, table));
    document.documentElement.dataset.qsaTables = "ready";
  });
})();
