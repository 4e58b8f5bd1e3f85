//! Adapters that lie in an object store or with a peer: headers first, then data in parallel ranged reads.
//!
//! [`AdapterSource`] is a place that holds adapters: `host:port` of a peer, a URL of a store, or any store of the `object_store`
//! crate that an engine has set up. [`AdapterSource::adapter`] reads an adapter's config and the header of its weights, which is
//! enough to audit it ([`audit_manifest`](crate::audit_manifest)) and to plan it into a slot
//! ([`build_land_targets`](crate::build_land_targets)); [`RemoteAdapter::fetch`] reads the data into an [`AdapterStore`], which
//! is then audited, packed and swapped in like every other. So a peer can fail at any byte and no slot has been touched.
//!
//! The interface is synchronous, as the rest of this crate is. Each source has a small tokio runtime of its own; a call makes one
//! thread that drives all reads of that call and ends with it, and blocks the caller meanwhile. It may be called from anywhere,
//! from a thread of an engine's own runtime too.
//!
//! What is not trusted: every answer's length and range, that the file is still the one whose header was read (size, ETag and
//! time of modification of every answer are compared), that an answer ends ([`SourceOptions::timeout`]), and what the header says.
//! Memory grows with the bytes that have come, not with those that a header promises: the file once, and its largest tensor.
//!
//! ```no_run
//! use lora_weights::source::{AdapterSource, SourceOptions};
//!
//! let peer = AdapterSource::open("gpu-7:8000", SourceOptions::default())?;
//! let adapter = peer.adapter("sql-expert")?; // http://gpu-7:8000/sql-expert/adapter_config.json, and a header
//! println!("{} tensors", adapter.manifest().weights.tensors().len());
//! let store = adapter.fetch(&|progress| eprintln!("{} of {} bytes", progress.bytes, progress.total))?;
//! assert_eq!(store.tensors().len(), adapter.manifest().weights.tensors().len());
//! # Ok::<(), lora_weights::source::SourceError>(())
//! ```

mod blocking;
mod cloud;
mod error;
mod location;
mod pieces;
mod read;

pub use error::SourceError;

use crate::{AdapterManifest, AdapterStore, LandTarget, MemoryTensor};
use blocking::Blocking;
use bytes::Bytes;
use object_store::ObjectStore;
use object_store::path::Path;
use pieces::Assembly;
use read::RemoteFile;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// How a source is read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceOptions {
    /// Time that one read, of at most [`piece_bytes`](Self::piece_bytes), may take from the question to its last byte.
    pub timeout: Duration,
    /// How often a read is tried again where the connection failed or the server said that it is busy.
    pub retries: usize,
    /// Reads under way at the same time, at least 1.
    pub parallel: usize,
    /// Bytes a read, at least 1: smaller tensors are read together, larger ones in several reads.
    pub piece_bytes: u64,
    /// Largest weights file.
    pub max_file_bytes: u64,
    /// Settings of a cloud provider's store, by the names of its own tools (`AWS_REGION`, `GOOGLE_SERVICE_ACCOUNT`,
    /// `AZURE_STORAGE_ACCOUNT_KEY`, ...); those of other stores are passed over.
    pub settings: Vec<(String, String)>,
}

impl Default for SourceOptions {
    /// 60 s, 2 retries, 8 reads of 4 MiB at a time, files of at most 64 GiB, no settings.
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(60),
            retries: 2,
            parallel: 8,
            piece_bytes: 4 << 20,
            max_file_bytes: 64 << 30,
            settings: Vec::new(),
        }
    }
}

/// How far a fetch is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FetchProgress {
    /// Bytes that have come.
    pub bytes: u64,
    /// Bytes of all tensors.
    pub total: u64,
}

/// A place that holds adapters, each in a folder of its own.
#[derive(Clone)]
pub struct AdapterSource {
    shared: Arc<Shared>,
}

struct Shared {
    store: Arc<dyn ObjectStore>,
    base: Path,
    url: String,
    options: SourceOptions,
    blocking: Blocking,
}

impl AdapterSource {
    /// The place at `location`: `host:port` of a peer, which means `http://host:port/`, or a URL (`http`, `https`, `file`; `s3`,
    /// `gs` and `az` with the features `aws`, `gcp` and `azure`). Nothing is read yet.
    ///
    /// # Errors
    /// [`SourceError::BadLocation`], [`SourceError::Store`] where a setting is missing or a feature is off,
    /// [`SourceError::Runtime`].
    pub fn open(location: &str, options: SourceOptions) -> Result<Self, SourceError> {
        let place = location::resolve(location, &options)?;
        Self::new(place, options)
    }

    /// The folder `base` of a store that an engine has set up. `url` names it in errors.
    ///
    /// # Errors
    /// [`SourceError::BadLocation`] for a `base` that is no path, [`SourceError::Runtime`].
    pub fn with_store(
        store: Arc<dyn ObjectStore>,
        base: &str,
        url: &str,
        options: SourceOptions,
    ) -> Result<Self, SourceError> {
        let url = url.trim_end_matches('/').to_owned();
        let base = child(&Path::default(), base, &url)?;
        Self::new(location::Place { store, base, url }, options)
    }

    fn new(place: location::Place, options: SourceOptions) -> Result<Self, SourceError> {
        let location::Place { store, base, url } = place;
        let blocking = Blocking::new().map_err(|source| SourceError::Runtime {
            url: url.clone(),
            source,
        })?;
        Ok(Self {
            shared: Arc::new(Shared {
                store,
                base,
                url,
                options,
                blocking,
            }),
        })
    }

    /// Its URL, without a slash at the end.
    pub fn url(&self) -> &str {
        &self.shared.url
    }

    /// Reads the config and the weights' header of the adapter in folder `id`, which may be nested (`team/sql-expert`) or, where
    /// the source is the adapter's own folder, empty. No byte of a tensor
    /// is asked for.
    ///
    /// # Errors
    /// A [`SourceError`] that names the file.
    pub fn adapter(&self, id: &str) -> Result<RemoteAdapter, SourceError> {
        let shared = &self.shared;
        let folder = child(&shared.base, id, &shared.url)?;
        let url = match id.trim_matches('/') {
            "" => shared.url.clone(),
            id => format!("{}/{id}", shared.url),
        };
        let (config_json, (file, weights)) = shared.run(shared.open_adapter(&folder, &url))?;
        Ok(RemoteAdapter {
            shared: Arc::clone(shared),
            file,
            manifest: AdapterManifest {
                location: url,
                config_json,
                weights,
            },
        })
    }
}

impl std::fmt::Debug for AdapterSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AdapterSource")
            .field("url", &self.shared.url)
            .finish_non_exhaustive()
    }
}

impl Shared {
    fn run<T: Send>(
        &self,
        future: impl Future<Output = Result<T, SourceError>> + Send,
    ) -> Result<T, SourceError> {
        let ran = self.blocking.run(future);
        ran.unwrap_or_else(|source| {
            Err(SourceError::Runtime {
                url: self.url.clone(),
                source,
            })
        })
    }
}

/// An adapter in a source, its config and header read and its data not.
#[derive(Clone)]
pub struct RemoteAdapter {
    shared: Arc<Shared>,
    file: RemoteFile,
    manifest: AdapterManifest,
}

impl RemoteAdapter {
    /// Opens the adapter whose folder is at `location`, as [`AdapterSource::open`] takes it.
    ///
    /// # Errors
    /// As [`AdapterSource::open`] and [`AdapterSource::adapter`].
    pub fn open(location: &str, options: SourceOptions) -> Result<Self, SourceError> {
        AdapterSource::open(location, options)?.adapter("")
    }

    /// Its config and header.
    pub fn manifest(&self) -> &AdapterManifest {
        &self.manifest
    }

    /// Reads all data into memory: ranged reads of [`SourceOptions::piece_bytes`], [`SourceOptions::parallel`] at a time.
    /// `progress` is told after each of them.
    ///
    /// # Errors
    /// A [`SourceError`] that names URL, tensor and both numbers where a read fails, is late, short or long, or where the file is
    /// not the one whose header was read. What has come till then is dropped.
    pub fn fetch(
        &self,
        progress: &(dyn Fn(FetchProgress) + Sync),
    ) -> Result<AdapterStore, SourceError> {
        let _span = tracing::info_span!("lora_fetch", url = %self.file.url()).entered();
        let shared = &self.shared;
        let weights = &self.manifest.weights;
        let mut assembly = Assembly::new(weights);
        let take = |start, piece: &Bytes| assembly.take(start, piece);
        shared.run(shared.fetch((&self.file, weights), take, progress))?;
        let data = assembly.finish();
        let tensors = weights.tensors().iter().zip(data).map(|(meta, data)| {
            MemoryTensor::new(meta.name.clone(), meta.dtype, meta.shape.clone(), data)
        });
        AdapterStore::from_tensors(self.manifest.config_json.clone(), tensors)
            .map_err(|source| self.file.header(source))
    }

    /// Reads what a landing plan asks for straight into staging memory, as [`stage_landed`](crate::LoraWeights::stage_landed)
    /// gives it: BF16 adapters take no memory but their slot's image and the reads under way. Reads as [`fetch`](Self::fetch) does.
    ///
    /// ```no_run
    /// # use lora_weights::{LandingInput, LoraWeights, SlotTarget, source::RemoteAdapter};
    /// # fn promote(weights: &LoraWeights, remote: &RemoteAdapter) -> Result<(), Box<dyn std::error::Error>> {
    /// let manifest = remote.manifest();
    /// let config = manifest.config(&Default::default())?;
    /// let input = LandingInput::new("sql-expert", &manifest.weights, &config);
    /// let staged = weights.stage_landed(&input, |targets, image| Ok(remote.land(targets, image, &|_| ())?))?;
    /// weights.pack_store_into_slot(SlotTarget::Victim, staged)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`fetch`](Self::fetch).
    ///
    /// # Panics
    /// Where `image` does not hold the destinations.
    pub fn land(
        &self,
        targets: &[LandTarget],
        image: &mut [u8],
        progress: &(dyn Fn(FetchProgress) + Sync),
    ) -> Result<(), SourceError> {
        let _span = tracing::info_span!("lora_fetch", url = %self.file.url()).entered();
        let shared = &self.shared;
        let mut by_source: Vec<(Range<u64>, &LandTarget)> = targets
            .iter()
            .map(|target| (target.source(), target))
            .collect();
        by_source.sort_by_key(|(source, _)| source.start);
        let take = |start: u64, piece: &Bytes| {
            let end = start + piece.len() as u64;
            // Targets of one stack overlap, so that only the start is in order.
            let before_end = by_source.partition_point(|(source, _)| source.start < end);
            for (_, target) in by_source[..before_end]
                .iter()
                .filter(|(source, _)| source.end > start)
            {
                target.copy_piece(start, piece, image);
            }
        };
        shared.run(shared.fetch((&self.file, &self.manifest.weights), take, progress))
    }
}

impl std::fmt::Debug for RemoteAdapter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RemoteAdapter")
            .field("url", &self.manifest.location)
            .field("tensors", &self.manifest.weights.tensors().len())
            .finish_non_exhaustive()
    }
}

/// Reads config and header of the adapter `id` of a peer (`host:port`, or a URL as [`AdapterSource::open`] takes it): names,
/// dtypes, shapes and byte ranges of its tensors, and with the config ranks, alphas and scales. No tensor's data is read.
///
/// # Errors
/// As [`AdapterSource::open`] and [`AdapterSource::adapter`].
pub fn fetch_adapter_manifest(peer: &str, id: &str) -> Result<AdapterManifest, SourceError> {
    let source = AdapterSource::open(peer, SourceOptions::default())?;
    Ok(source.adapter(id)?.manifest)
}

/// `base` and the folders of `id` below it.
fn child(base: &Path, id: &str, url: &str) -> Result<Path, SourceError> {
    let below = Path::parse(id).map_err(|error| SourceError::BadLocation {
        location: format!("{url}/{id}"),
        detail: error.to_string(),
    })?;
    Ok(below.parts().fold(base.clone(), Path::join))
}
