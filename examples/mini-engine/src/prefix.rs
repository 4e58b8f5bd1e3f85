//! Prompts that were prefilled, for later requests that begin alike.

use crate::SequenceCache;
use std::collections::VecDeque;

/// Caches of prefilled prompts. The same tokens through another adapter, or through other weights under the same name, give other
/// keys and values: an entry serves only requests of the same `adapter_id`.
#[derive(Debug)]
pub struct PrefixCache {
    entries: VecDeque<Entry>,
    capacity: usize,
}

#[derive(Debug)]
struct Entry {
    adapter_id: u64,
    tokens: Vec<u32>,
    cache: SequenceCache,
}

impl PrefixCache {
    /// Room for `capacity` prompts; the oldest makes room for the next.
    pub fn new(capacity: usize) -> Self {
        Self {
            entries: VecDeque::with_capacity(capacity),
            capacity,
        }
    }

    /// The cache of the longest stored prompt that `tokens` begin with.
    pub fn longest(&self, adapter_id: u64, tokens: &[u32]) -> Option<SequenceCache> {
        let fits =
            |entry: &&Entry| entry.adapter_id == adapter_id && tokens.starts_with(&entry.tokens);
        let longest = self
            .entries
            .iter()
            .filter(fits)
            .max_by_key(|entry| entry.tokens.len());
        longest.map(|entry| entry.cache.clone())
    }

    /// Stores what `tokens` left behind.
    pub fn insert(&mut self, adapter_id: u64, tokens: &[u32], cache: &SequenceCache) {
        let is_same = |entry: &Entry| entry.adapter_id == adapter_id && entry.tokens == tokens;
        if self.capacity == 0 || self.entries.iter().any(is_same) {
            return;
        }
        if self.entries.len() == self.capacity {
            self.entries.pop_front();
        }
        self.entries.push_back(Entry {
            adapter_id,
            tokens: tokens.to_vec(),
            cache: cache.clone(),
        });
    }
}
