//! A request under way.

use crate::math::largest;
use crate::{Request, Response, SequenceCache, StepRow};
use lora_runtime::weights::SlotLease;

/// A request that was admitted: it holds its adapter until it has ended.
#[derive(Debug)]
pub(crate) struct Sequence {
    request: Request,
    pub(crate) lease: SlotLease,
    pub(crate) cache: SequenceCache,
    /// Prompt, then what was generated.
    tokens: Vec<u32>,
    cached_tokens: usize,
    logits: Vec<Vec<f32>>,
}

impl Sequence {
    pub(crate) fn new(request: Request, lease: SlotLease, cache: SequenceCache) -> Self {
        Self {
            tokens: request.prompt.clone(),
            cached_tokens: cache.len,
            logits: Vec::new(),
            request,
            lease,
            cache,
        }
    }

    /// Rows that are ready to pass: what is left of the prompt but for its last token, whose row is the first to generate, like
    /// every row from then on.
    pub(crate) fn rows_ready(&self) -> usize {
        let prefill = self.request.prefix().len().saturating_sub(self.cache.len);
        prefill.max(1)
    }

    /// The next `count` rows; the sequence is the `index`-th of its step.
    pub(crate) fn rows(&self, index: usize, count: usize) -> impl Iterator<Item = StepRow> {
        let positions = self.cache.len..self.cache.len + count;
        positions.map(move |position| StepRow {
            sequence: index,
            token: self.tokens[position],
            position,
        })
    }

    /// Takes the logits of a row that has passed; those of the last token say the next one.
    pub(crate) fn accept(&mut self, position: usize, logits: &[f32]) {
        if self.request.keep_logits && position < self.request.prompt.len() {
            self.logits.push(logits.to_vec());
        }
        if position + 1 == self.tokens.len() && self.generated() < self.request.max_tokens {
            self.tokens
                .extend(largest(logits, 1).into_iter().map(|token| token as u32));
        }
    }

    /// What later requests may start from: the prompt but for its last token, once exactly that has passed.
    pub(crate) fn prefilled(&self) -> Option<&[u32]> {
        let prefix = self.request.prefix();
        (!prefix.is_empty() && self.cache.len == prefix.len()).then_some(prefix)
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.cache.len >= self.request.prompt.len() && self.generated() >= self.request.max_tokens
    }

    fn generated(&self) -> usize {
        self.tokens.len() - self.request.prompt.len()
    }

    /// The response; the adapter is given back.
    pub(crate) fn into_response(mut self) -> Response {
        Response {
            tokens: self.tokens.split_off(self.request.prompt.len()),
            slot: self.lease.slot(),
            adapter_id: self.lease.adapter_id(),
            cached_tokens: self.cached_tokens,
            logits: self.logits,
            request: self.request,
        }
    }
}
