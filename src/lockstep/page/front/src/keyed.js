// A list of views that follows a list of data: what is still there stays as it is, with its focus, zoom and toggles.

/**
 * @template Item
 * @typedef {{ element: Element, update: (item: Item) => void, remove: () => void }} View
 */

/**
 * @template Item
 * @template {View<Item>} ItemView
 * @param {Element} parent
 * @param {(item: Item) => string} keyOf
 * @param {(item: Item) => ItemView} create
 */
export function keyedList(parent, keyOf, create) {
  /** @type {Map<string, ItemView>} */
  let views = new Map();
  return {
    views: () => [...views.values()],
    /** @param {Item[]} items */
    update(items) {
      const next = new Map();
      for (const item of items) {
        let key = keyOf(item);
        while (next.has(key)) key += "+";
        const view = views.get(key);
        view?.update(item);
        next.set(key, view ?? create(item));
      }
      for (const [key, view] of views) if (!next.has(key)) view.remove();
      let place = parent.firstElementChild;
      for (const { element } of next.values()) {
        if (element === place) place = element.nextElementSibling;
        else parent.insertBefore(element, place);
      }
      views = next;
    },
    clear() {
      for (const view of views.values()) view.remove();
      views = new Map();
    },
  };
}
