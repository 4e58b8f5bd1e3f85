//! Adapters that lie in an object store or with a peer.

use crate::{Adapter, LoraRuntime, RuntimeError};
use lora_weights::source::{FetchProgress, RemoteAdapter};
use lora_weights::{AuditReport, audit_manifest};

impl LoraRuntime {
    /// What can be said of a remote adapter for this pool from its config and header, with no data read. The warning
    /// `values-unread` is among the findings.
    pub fn audit_remote(&self, remote: &RemoteAdapter) -> AuditReport {
        let pool = self.audited_pool();
        audit_manifest(remote.manifest(), self.parse_options(), self.model(), &pool)
    }

    /// Brings a remote adapter into host memory, where its header says that it would load. It is then an [`Adapter`] like every
    /// other: [`promote`](Self::promote) or [`swap`](Self::swap) audit its values and bring it into a slot, so that a peer can send
    /// what it wants, or die at any byte, and no slot was touched. `progress` is told after each read.
    ///
    /// The call blocks; routing, launches and every other slot go on meanwhile.
    ///
    /// # Errors
    /// [`WeightsError::Refused`](lora_weights::WeightsError::Refused) before any data is asked for, [`RuntimeError::Source`], [`RuntimeError::AdapterConfig`].
    pub fn fetch_adapter(
        &self,
        name: impl Into<String>,
        remote: &RemoteAdapter,
        progress: &(dyn Fn(FetchProgress) + Sync),
    ) -> Result<Adapter, RuntimeError> {
        let adapter = name.into();
        self.weights().accept(&adapter, self.audit_remote(remote))?;
        match remote.fetch(progress) {
            Ok(store) => Adapter::from_store(adapter, store, self.parse_options()),
            Err(source) => Err(RuntimeError::Source {
                adapter,
                source: Box::new(source),
            }),
        }
    }
}
