/** What the user can do something about. The message is one sentence, shown as it is. */
export class PageError extends Error {}
