// Text → token ids → text, by the rules in an export's tokenizer.json: BPE and unigram vocabularies.
// docs/web.md describes the file. The ids are those of the Python package `tokenizers`, whose order of steps this is:
// added tokens that are looked for in the text itself, the normaliser, other added tokens, splits into words, the model.

const CACHED_WORDS = 20_000; // ids of so many words are remembered
const CACHED_LENGTH = 40; // of words that are no longer
const SPACE = /\p{White_Space}/u;
const WORD = /^[\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\p{Join_Control}]$/u;

/** Byte-level vocabularies write each byte as a printable character: itself, or one from U+0100 on. */
const ALPHABET = [];
for (let byte = 0, others = 0; byte < 256; byte++) {
  const printable = (byte > 32 && byte < 127) || (byte > 160 && byte !== 173);
  ALPHABET.push(String.fromCharCode(printable ? byte : 256 + others++));
}
const BYTES = new Map(ALPHABET.map((character, byte) => [character, byte]));

const encoder = new TextEncoder();

/** UTF-8 in the alphabet of bytes. */
function byteText(text) {
  let written = "";
  for (const byte of encoder.encode(text)) written += ALPHABET[byte];
  return written;
}

export class Tokenizer {
  #words = new Map(); // the cache, of the vocabulary with special tokens and of the one without
  #plainWords = new Map();
  #bytes = new Map(); // of tokens
  #cutters = new Map(); // by what is looked for

  /** `file`: what is in tokenizer.json. `about`: the entry "text" of plan.json. */
  constructor(file, about) {
    this.file = file;
    this.about = about;
    this.silent = new Set(about.silent_ids);
    this.addedIds = new Set(file.added.map(({ id }) => id));
    this.byteIds = new Set(file.byte_ids);
    this.ids = new Map(file.tokens.map((text, id) => [text, id]));
    const classes = file.classes.map(characterClass);
    const compiled = (rule) => ({ ...rule, expression: rule.expression && compile(rule.expression, classes) });
    this.normalizer = file.normalizer.map(compiled);
    this.splits = file.splits.map(compiled);
    // Where it is the last rule, words are written as bytes when they are not in the cache.
    this.bytesLast = this.splits.at(-1)?.kind === "bytes" && Boolean(this.splits.pop());
    const hidden = new Set(file.hidden);
    this.model = file.merges ? new Merges(file, this.ids) : new Unigram(file, this.ids, new Set());
    this.plainModel = hidden.size ? new Unigram(file, this.ids, hidden) : this.model;
    if (this.model === this.plainModel) this.#plainWords = this.#words;
  }

  /** Token ids. parseSpecial: the text of a special token is that token. A mark within it keeps it from being one. */
  encode(text, { parseSpecial = true, mark = "" } = {}) {
    const ids = [];
    if (!text.includes(mark)) mark = "";
    if (mark && !this.file.merges) this.#encodeParts(text, mark, ids);
    else this.#encode(text, mark ? "marked" : parseSpecial ? "special" : "plain", mark, ids);
    const { add_bos, bos_id } = this.about;
    if (add_bos && bos_id !== null && ids[0] !== bos_id) ids.unshift(bos_id);
    return ids;
  }

  /** A unigram model would find special tokens where a mark was: what is between them goes to the plain one. */
  #encodeParts(text, mark, ids) {
    const special = this.file.added.filter((token) => token.special).map(({ id }) => ({ id }));
    for (const part of new Cutter(special, ({ id }) => this.file.tokens[id]).cut(text)) {
      if (typeof part === "number") ids.push(part);
      else this.#encode(part.replaceAll(mark, ""), "plain", "", ids);
    }
  }

  #encode(text, wanted, mark, ids) {
    const [first, second] = this.#cuttersOf(wanted);
    const isPlain = wanted === "plain";
    for (const [i, part] of first.cut(text).entries()) {
      if (typeof part === "number") {
        ids.push(part);
        continue;
      }
      const normal = this.#normalized(mark ? part.replaceAll(mark, "") : part);
      for (const [j, each] of second.cut(normal).entries()) {
        if (typeof each === "number") ids.push(each);
        else for (const word of this.#split(each, i + j === 0)) this.#encodeWord(word, isPlain, ids);
      }
    }
  }

  /** What looks for added tokens: in a text, and in what the normaliser makes of it. */
  #cuttersOf(wanted) {
    let cutters = this.#cutters.get(wanted);
    if (!cutters) {
      const tokens = this.file.added.filter((token) => wanted !== "plain" || !token.special);
      const isLate = (token) => Boolean(token.normalized) && !(wanted === "marked" && token.special);
      cutters = [
        new Cutter(tokens.filter((token) => !isLate(token)), ({ id }) => this.file.tokens[id]),
        new Cutter(tokens.filter(isLate), ({ id }) => this.#normalized(this.file.tokens[id])),
      ];
      this.#cutters.set(wanted, cutters);
    }
    return cutters;
  }

  #normalized(text) {
    for (const rule of this.normalizer) text = NORMALIZE[rule.kind](text, rule);
    return text;
  }

  #split(text, isFirst) {
    let words = [text];
    for (const rule of this.splits) {
      words = words.flatMap((word, i) => SPLIT[rule.kind](word, rule, isFirst && i === 0)).filter(Boolean);
    }
    return words;
  }

  #encodeWord(word, isPlain, ids) {
    const cache = isPlain ? this.#plainWords : this.#words;
    let found = cache.get(word);
    if (!found) {
      const model = isPlain ? this.plainModel : this.model;
      found = model.encode(this.bytesLast ? byteText(word) : word);
      if (word.length <= CACHED_LENGTH) {
        if (cache.size >= CACHED_WORDS) cache.clear();
        cache.set(word, found);
      }
    }
    for (let i = 0; i < found.length; i++) ids.push(found[i]);
  }

  /** The bytes that a token adds to a text. Special tokens add none, except for those that are shown. */
  bytesOf(id, shown) {
    let bytes = this.#bytes.get(id);
    if (bytes === undefined) this.#bytes.set(id, (bytes = this.#bytesOf(id)));
    return bytes.length === 0 && shown?.has(id) ? encoder.encode(this.file.tokens[id]) : bytes;
  }

  #bytesOf(id) {
    const text = this.file.tokens[id];
    if (text === undefined || this.silent.has(id)) return new Uint8Array();
    if (this.byteIds.has(id)) return Uint8Array.of(parseInt(text.slice(3, 5), 16));
    if (this.about.decoder === "sentencepiece") return encoder.encode(text.replaceAll("▁", " "));
    const bytes = this.addedIds.has(id) ? [undefined] : Array.from(text, (character) => BYTES.get(character));
    return bytes.includes(undefined) ? encoder.encode(text) : Uint8Array.from(bytes);
  }

  /** The text of token ids, without special tokens. */
  decode(ids) {
    const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
    let text = "";
    for (const id of ids) text += decoder.decode(this.bytesOf(id), { stream: true });
    text += decoder.decode();
    return this.about.add_space_prefix && text.startsWith(" ") ? text.slice(1) : text;
  }
}

// Rules -----------------------------------------------------------------------------------------------------

/** A class of characters, given where it begins and ends, each as its distance from the one before. */
function characterClass(gaps) {
  let at = 0;
  const ends = gaps.map((gap, i) => written((at += gap) - (i % 2)) + (i % 2 ? "" : "-"));
  return `[${ends.join("")}]`;
}

/** A character within a class. The shorter an expression is, the faster browsers are with it. */
const written = (code) => (code < 128 ? `\\u{${code.toString(16)}}` : String.fromCodePoint(code));

/** An expression, with the classes that it names by their number. */
const compile = (source, classes) => new RegExp(source.replace(/\{\{(\d+)\}\}/g, (_, i) => classes[i]), "gu");

/** Begin and end of every match. Groups whose name begins with k are before it. None is empty and at the end of another. */
function* matches(expression, text) {
  let last = -1;
  expression.lastIndex = 0; // not matchAll: that makes an expression of its own for each text, which takes longer
  for (let match; (match = expression.exec(text)); ) {
    let start = match.index;
    for (const name in match.groups) if (name[0] === "k") start += match.groups[name]?.length ?? 0;
    const end = match.index + match[0].length;
    if (!match[0]) expression.lastIndex += text.codePointAt(end) > 0xffff ? 2 : 1;
    if (start < end || end !== last) yield [start, (last = end)];
  }
}

function replace(text, { expression, by }) {
  let replaced = "";
  let at = 0;
  for (const [start, end] of matches(expression, text)) {
    replaced += text.slice(at, start) + by;
    at = end;
  }
  return replaced + text.slice(at);
}

/** Characters that a table replaces: a character with what combines with it, if they have less than six bytes, or alone. */
function replaceCharacters(text, rule) {
  rule.table ??= new Map(rule.pairs);
  rule.segmenter ??= new Intl.Segmenter("en", { granularity: "grapheme" });
  const found = (part) => {
    let begin = "";
    for (const character of part) {
      const by = rule.table.get((begin += character));
      if (by !== undefined) return by;
    }
  };
  const alone = (part) => Array.from(part, (character) => found(character) ?? character).join("");
  const together = (part) => (encoder.encode(part).length < 6 ? found(part) : undefined) ?? alone(part);
  // Two neighbours in ASCII never combine, except for those of a line's end.
  return text.replace(/\r\n|[\0-\x7f]?(?:[^\0-\x7f]+(?:\r\n|[\0-\x7f])?)+|[\0-\x7f]/g, (part) => {
    if (part.length === 1) return found(part) ?? part;
    let replaced = "";
    for (const { segment } of rule.segmenter.segment(part)) replaced += together(segment);
    return replaced;
  });
}

/** Text → text. */
const NORMALIZE = {
  form: (text, { expression, form }) => text.replace(expression, (part) => part.normalize(form)),
  lowercase: (text, { expression }) => text.replace(expression, (character) => character.toLowerCase()),
  prepend: (text, { by }) => text && by + text,
  replace,
  characters: replaceCharacters,
};

/** Text → words. */
const SPLIT = {
  replace,
  prefix: (text, { by, first }, isFirst) => ((first && !isFirst) || text.startsWith(by) ? text : by + text),
  bytes: byteText,
  split: (text, { expression, behavior, invert }) => {
    const parts = []; // begin, end, and is it a match?
    let at = 0;
    for (const [start, end] of matches(expression, text)) {
      if (at < start) parts.push([at, start, invert]);
      parts.push([start, end, !invert]);
      at = end;
    }
    if (at < text.length) parts.push([at, text.length, invert]);
    return joined(parts, behavior).map(([start, end]) => text.slice(start, end));
  },
};

/** The parts of a split, each alone, without matches, or with matches as a part of a neighbour. */
function joined(parts, behavior) {
  if (behavior === "isolated") return parts;
  if (behavior === "removed") return parts.filter(([, , isMatch]) => !isMatch);
  if (behavior === "next") parts.reverse();
  const joints = [];
  let before = false;
  for (const [start, end, isMatch] of parts) {
    const last = joints.at(-1);
    if (last && (behavior === "contiguous" ? isMatch === before : isMatch && !before)) {
      last[0] = Math.min(last[0], start);
      last[1] = Math.max(last[1], end);
    } else joints.push([start, end]);
    before = isMatch;
  }
  return behavior === "next" ? joints.reverse() : joints;
}

// Texts that are looked for ---------------------------------------------------------------------------------

/** Texts in order, so that those that begin alike are neighbours. */
class Prefixes {
  constructor(texts) {
    this.texts = texts.sort();
    this.ranges = new Map(); // of texts, by their first character
  }

  /** Call `each` with the texts that begin at this place, the shortest first. */
  find(text, at, each) {
    const { texts } = this;
    const first = text.charCodeAt(at);
    let range = this.ranges.get(first);
    if (!range) this.ranges.set(first, (range = this.#narrow([0, texts.length], 0, first)));
    for (let depth = 1; range[0] < range[1]; depth++) {
      const found = texts[range[0]];
      if (found.length === depth) each(found);
      if (at + depth >= text.length) return;
      range = this.#narrow(range, depth, text.charCodeAt(at + depth));
    }
  }

  /** Those of a range of texts that have a character at a place. */
  #narrow([low, high], place, code) {
    const bound = (from, least) => {
      let to = high;
      while (from < to) {
        const middle = (from + to) >> 1;
        if (this.texts[middle].charCodeAt(place) >= least) to = middle;
        else from = middle + 1;
      }
      return from;
    };
    const begin = bound(low, code);
    return [begin, bound(begin, code + 1)];
  }
}

/** Cuts added tokens out of a text: the first one first, of several that begin at one place the longest. */
class Cutter {
  constructor(tokens, textOf) {
    this.tokens = new Map();
    for (const token of tokens) {
      const text = textOf(token);
      if (text && !this.tokens.has(text)) this.tokens.set(text, token);
    }
    this.prefixes = new Prefixes([...this.tokens.keys()]);
  }

  /** Texts and ids, in order. */
  cut(text) {
    if (!this.tokens.size) return text ? [text] : [];
    const parts = [];
    let begin = 0;
    let longest = "";
    const longer = (found) => (longest = found);
    for (let at = 0; at < text.length; at++) {
      longest = "";
      this.prefixes.find(text, at, longer);
      if (!longest) continue;
      const token = this.tokens.get(longest);
      let [start, end] = [at, at + longest.length];
      at = end - 1;
      if (token.single_word && (isWord(text, start, -1) || isWord(text, end, 1))) continue;
      while (token.lstrip && start > begin && SPACE.test(text[start - 1])) start--;
      while (token.rstrip && end < text.length && SPACE.test(text[end])) end++;
      if (begin < start) parts.push(text.slice(begin, start));
      parts.push(token.id);
      begin = end;
    }
    if (begin < text.length) parts.push(text.slice(begin));
    return parts;
  }
}

/** Is there a letter or the like before a place, or after it? */
function isWord(text, at, side) {
  const around = Array.from(text.slice(Math.max(0, side < 0 ? at - 2 : at), side < 0 ? at : at + 2));
  return WORD.test(around.at(side < 0 ? -1 : 0) ?? "");
}

// Models ----------------------------------------------------------------------------------------------------

/** The tokens <0x00> … <0xFF> of a text's bytes; null if one of them is not in the vocabulary. */
function byteTokens(text, ids) {
  const tokens = Array.from(encoder.encode(text), (byte) =>
    ids.get(`<0x${byte.toString(16).toUpperCase().padStart(2, "0")}>`),
  );
  return tokens.includes(undefined) ? null : tokens;
}

/** BPE: of all neighbours, those that come first in a list are merged first. */
class Merges {
  constructor({ tokens, merges, model }, ids) {
    this.ids = ids;
    this.rules = model;
    const count = merges.length / 2;
    this.left = new Int32Array(count);
    this.right = new Int32Array(count);
    this.merged = new Int32Array(count);
    let bits = 4;
    while (2 ** bits < 2 * count) bits++;
    this.shift = 32 - bits;
    this.mask = 2 ** bits - 1;
    this.table = new Int32Array(2 ** bits).fill(-1); // of merges by their neighbours
    for (let i = 0, id = 0; i < count; i++) {
      const text = tokens[(id += merges[2 * i])];
      const cut = merges[2 * i + 1];
      this.merged[i] = id;
      this.left[i] = ids.get(text.slice(0, cut));
      this.right[i] = ids.get(text.slice(cut));
      let slot = this.#slot(this.left[i], this.right[i]);
      while (this.table[slot] >= 0) slot = (slot + 1) & this.mask;
      this.table[slot] = i;
    }
  }

  #slot(left, right) {
    return Math.imul(Math.imul(left, 0x9e3779b1) ^ right, 0x85ebca6b) >>> this.shift;
  }

  /** The number of a merge, or −1. */
  #find(left, right) {
    for (let slot = this.#slot(left, right); ; slot = (slot + 1) & this.mask) {
      const merge = this.table[slot];
      if (merge < 0 || (this.left[merge] === left && this.right[merge] === right)) return merge;
    }
  }

  encode(word) {
    if (this.rules.ignore_merges) {
      const whole = this.ids.get(word);
      if (whole !== undefined) return [whole];
    }
    return this.#merge(this.#symbols(word));
  }

  /** The tokens of the characters of a word. */
  #symbols(word) {
    const { unknown, fuse_unknown, byte_fallback } = this.rules;
    const symbols = [];
    let pending = false; // an unknown token that comes before the next known one, after bytes
    for (const character of word) {
      const id = this.ids.get(character);
      if (id !== undefined) {
        if (pending) symbols.push(unknown);
        pending = false;
        symbols.push(id);
        continue;
      }
      const bytes = byte_fallback ? byteTokens(character, this.ids) : null;
      if (bytes) symbols.push(...bytes);
      else if (unknown !== null) {
        if (pending && !fuse_unknown) symbols.push(unknown);
        pending = true;
      }
    }
    if (pending) symbols.push(unknown);
    return symbols;
  }

  #merge(ids) {
    const count = ids.length;
    if (count < 2) return ids;
    const symbols = Int32Array.from(ids);
    const before = new Int32Array(count);
    const after = new Int32Array(count);
    for (let i = 0; i < count; i++) [before[i], after[i]] = [i - 1, i + 1 < count ? i + 1 : -1];
    const heap = new Heap(); // of merge · 2^31 + place: the first merge first, of equal ones that to the left
    const offer = (place) => {
      if (place < 0 || after[place] < 0) return;
      const merge = this.#find(symbols[place], symbols[after[place]]);
      if (merge >= 0) heap.push(merge * 2 ** 31 + place);
    };
    for (let place = 0; place < count - 1; place++) offer(place);
    for (let key = heap.pop(); key !== undefined; key = heap.pop()) {
      const merge = Math.floor(key / 2 ** 31);
      const place = key - merge * 2 ** 31;
      const next = after[place];
      if (symbols[place] < 0 || next < 0) continue;
      // Others may have been merged meanwhile; what these make now is the same token or another one.
      const now = this.#find(symbols[place], symbols[next]);
      const token = this.merged[merge];
      if (now < 0 || this.merged[now] !== token) continue;
      symbols[place] = token;
      symbols[next] = -1;
      after[place] = after[next];
      if (after[next] >= 0) before[after[next]] = place;
      offer(before[place]);
      offer(place);
    }
    return Array.from(symbols.filter((id) => id >= 0));
  }
}

/** Numbers, the least first. */
class Heap {
  #items = [];

  push(item) {
    const items = this.#items;
    let at = items.length;
    items.push(item);
    while (at > 0) {
      const parent = (at - 1) >> 1;
      if (items[parent] <= item) break;
      items[at] = items[parent];
      at = parent;
    }
    items[at] = item;
  }

  pop() {
    const items = this.#items;
    const least = items[0];
    const item = items.pop();
    const count = items.length;
    if (!count) return least;
    let at = 0;
    for (let child = 1; child < count; child = 2 * at + 1) {
      if (child + 1 < count && items[child + 1] < items[child]) child++;
      if (items[child] >= item) break;
      items[at] = items[child];
      at = child;
    }
    items[at] = item;
    return least;
  }
}

/** The pieces with the highest sum of scores. A character that is no piece is unknown, which costs the most. */
class Unigram {
  constructor({ tokens, scores, model }, ids, hidden) {
    this.ids = hidden.size ? new Map([...ids].filter(([, id]) => !hidden.has(id))) : ids;
    this.rules = model;
    this.scores = scores;
    this.unknownScore = scores.reduce((least, score) => Math.min(least, score), Infinity) - 10;
    this.pieces = new Prefixes(tokens.filter((_, id) => !hidden.has(id)));
  }

  encode(word) {
    const { unknown, byte_fallback } = this.rules;
    const best = new Float64Array(word.length + 1);
    const begins = new Int32Array(word.length + 1).fill(-1);
    const last = new Int32Array(word.length + 1); // the piece that ends here
    let at = 0;
    let width = 0; // of the character
    let isKnown = false;
    const take = (end, id, score) => {
      const sum = score + best[at];
      if (begins[end] >= 0 && sum <= best[end]) return;
      best[end] = sum;
      begins[end] = at;
      last[end] = id;
    };
    const each = (piece) => {
      const id = this.ids.get(piece);
      take(at + piece.length, id, this.scores[id]);
      isKnown ||= piece.length === width;
    };
    for (; at < word.length; at += width) {
      width = word.codePointAt(at) > 0xffff ? 2 : 1;
      isKnown = false;
      this.pieces.find(word, at, each);
      if (!isKnown) take(at + width, unknown, this.unknownScore);
    }
    const ids = []; // from the end
    for (let end = word.length; end > 0; ) {
      let begin = begins[end];
      while (last[end] === unknown && begin > 0 && last[begin] === unknown) begin = begins[begin];
      const text = word.slice(begin, end);
      const tokens = this.ids.get(text) ?? ((byte_fallback && byteTokens(text, this.ids)) || unknown);
      if (typeof tokens === "number") ids.push(tokens);
      else for (const token of tokens.reverse()) ids.push(token);
      end = begin;
    }
    return ids.reverse();
  }
}
