//! Reads, each checked: the file, the range, the length, the time.

use super::pieces::plan;
use super::{FetchProgress, Shared, SourceError};
use crate::store::{CONFIG, LENGTH_BYTES, MAX_CONFIG_BYTES, OTHER_WEIGHTS, WEIGHTS};
use crate::{HeaderError, TensorId, WeightManifest};
use bytes::{Bytes, BytesMut};
use futures_util::{StreamExt, TryFutureExt, TryStreamExt, stream};
use object_store::path::Path;
use object_store::{GetOptions, GetRange, GetResult, ObjectMeta, ObjectStoreExt};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// What is allocated for an answer before any of it has come.
const FIRST_BYTES: u64 = 64 << 10;

/// The weights file, as it was when its header was read.
#[derive(Debug, Clone)]
pub(super) struct RemoteFile {
    path: Path,
    url: String,
    meta: ObjectMeta,
}

impl RemoteFile {
    pub(super) fn url(&self) -> &str {
        &self.url
    }

    pub(super) fn header(&self, source: HeaderError) -> SourceError {
        SourceError::Header {
            url: self.url.clone(),
            source,
        }
    }

    /// `now`, which came with an answer about `tensor`, is still this file.
    fn check(
        &self,
        now: &ObjectMeta,
        tensor: impl FnOnce() -> Option<String>,
    ) -> Result<(), SourceError> {
        let then = &self.meta;
        let tag = |meta: &ObjectMeta| meta.e_tag.clone().unwrap_or_else(|| "none".to_owned());
        let compared = [
            ("size", then.size.to_string(), now.size.to_string()),
            ("ETag", tag(then), tag(now)),
            (
                "time of modification",
                then.last_modified.to_string(),
                now.last_modified.to_string(),
            ),
        ];
        match compared.into_iter().find(|(_, then, now)| then != now) {
            None => Ok(()),
            Some((what, expected, found)) => Err(SourceError::Changed {
                url: self.url.clone(),
                tensor: tensor(),
                what,
                expected,
                found,
            }),
        }
    }
}

/// What is read: a range of a file, and whose bytes they are.
struct Question<'a> {
    path: &'a Path,
    url: &'a str,
    range: Range<u64>,
    /// The file that it must be, and what its header says; neither while the header is read.
    known: Option<(&'a RemoteFile, &'a WeightManifest)>,
}

impl Question<'_> {
    /// The tensor that the byte at `offset` is of.
    fn tensor_at(&self, offset: u64) -> Option<String> {
        let (_, weights) = self.known?;
        let ids = (0..weights.tensors().len()).map(TensorId);
        let mut holders = ids.filter(|id| weights.range(*id).contains(&offset));
        holders
            .next()
            .map(|id| weights.tensors()[id.0].name.clone())
    }

    fn failed(&self, source: object_store::Error) -> SourceError {
        SourceError::Read {
            url: self.url.to_owned(),
            tensor: self.tensor_at(self.range.start),
            range: self.range.clone(),
            source: Box::new(source),
        }
    }
}

impl Shared {
    /// Config and header of the adapter in `folder`, both asked for at once.
    pub(super) async fn open_adapter(
        &self,
        folder: &Path,
        url: &str,
    ) -> Result<(String, (RemoteFile, WeightManifest)), SourceError> {
        let config_url = format!("{url}/{CONFIG}");
        let weights_url = format!("{url}/{WEIGHTS}");
        let config = folder.clone().join(CONFIG);
        let weights = folder.clone().join(WEIGHTS);
        let both = futures_util::future::join(
            self.read_config(&config, &config_url),
            self.read_header(&weights, &weights_url),
        )
        .await;
        match both {
            (Ok(config), Ok(weights)) => Ok((config, weights)),
            (Err(error), _) => Err(error),
            (_, Err(SourceError::MissingWeights { url, .. })) => Err(SourceError::MissingWeights {
                url,
                instead: self.other_weights(folder).await,
            }),
            (_, Err(error)) => Err(error),
        }
    }

    async fn read_config(&self, path: &Path, url: &str) -> Result<String, SourceError> {
        let question = Question {
            path,
            url,
            range: 0..MAX_CONFIG_BYTES,
            known: None,
        };
        let (bytes, _) = match self.read(&question, GetOptions::default()).await {
            Err(error) if error.is_missing() => {
                let url = url.to_owned();
                return Err(SourceError::MissingConfig { url });
            }
            read => read?,
        };
        String::from_utf8(bytes.into()).map_err(|error| SourceError::ConfigNotUtf8 {
            url: url.to_owned(),
            valid_up_to: error.utf8_error().valid_up_to(),
        })
    }

    async fn read_header(
        &self,
        path: &Path,
        url: &str,
    ) -> Result<(RemoteFile, WeightManifest), SourceError> {
        let mut question = Question {
            path,
            url,
            range: 0..LENGTH_BYTES,
            known: None,
        };
        let (length, meta) = match self.read(&question, ranged(&question.range)).await {
            Ok(read) => read,
            Err(error) => return Err(self.without_start(path, error).await),
        };
        let file = RemoteFile {
            path: path.clone(),
            url: url.to_owned(),
            meta,
        };
        let size = file.meta.size;
        let limit = self.options.max_file_bytes;
        if size > limit {
            return Err(SourceError::TooLarge {
                url: url.to_owned(),
                bytes: size,
                limit,
            });
        }
        let Some(first) = length.first_chunk() else {
            return Err(file.header(HeaderError::TooShort { bytes: size }));
        };
        let needed = WeightManifest::prefix_bytes(*first, size).map_err(|e| file.header(e))?;
        let mut prefix = length.clone();
        if needed > LENGTH_BYTES {
            question.range = LENGTH_BYTES..needed;
            let (header, now) = self.read(&question, ranged(&question.range)).await?;
            file.check(&now, || None)?;
            prefix = [length, header].concat().into();
        }
        let weights = WeightManifest::parse(&prefix, size).map_err(|e| file.header(e))?;
        Ok((file, weights))
    }

    /// Why the first bytes of a weights file could not be read: there is no file, or it is empty, which servers refuse to give a
    /// range of, or `error`.
    async fn without_start(&self, path: &Path, error: SourceError) -> SourceError {
        let SourceError::Read { url, .. } = &error else {
            return error;
        };
        let url = url.clone();
        if error.is_missing() {
            return SourceError::MissingWeights { url, instead: None };
        }
        match tokio::time::timeout(self.options.timeout, self.store.head(path)).await {
            Ok(Ok(meta)) if meta.size < LENGTH_BYTES => SourceError::Header {
                url,
                source: HeaderError::TooShort { bytes: meta.size },
            },
            _ => error,
        }
    }

    /// Name of a weights file in another format.
    async fn other_weights(&self, folder: &Path) -> Option<String> {
        for name in OTHER_WEIGHTS {
            let file = folder.clone().join(name);
            let head = tokio::time::timeout(self.options.timeout, self.store.head(&file));
            if matches!(head.await, Ok(Ok(_))) {
                return Some(name.to_owned());
            }
        }
        None
    }

    /// Reads every tensor's bytes, piece by piece in the order in which they come, and hands each to `take` with its place in the file.
    pub(super) async fn fetch(
        &self,
        (file, weights): (&RemoteFile, &WeightManifest),
        mut take: impl FnMut(u64, &Bytes) + Send,
        progress: &(dyn Fn(FetchProgress) + Sync),
    ) -> Result<(), SourceError> {
        let pieces = plan(weights, self.options.piece_bytes);
        let total = pieces.iter().map(|piece| piece.end - piece.start).sum();
        let reads = pieces.into_iter().map(|range| async {
            let question = Question {
                path: &file.path,
                url: &file.url,
                range,
                known: Some((file, weights)),
            };
            let (bytes, _) = self.read(&question, ranged(&question.range)).await?;
            Ok((question.range.start, bytes))
        });
        let mut reads = stream::iter(reads).buffer_unordered(self.options.parallel.max(1));
        let mut bytes = 0;
        while let Some((start, piece)) = reads.try_next().await? {
            bytes += piece.len() as u64;
            take(start, &piece);
            progress(FetchProgress { bytes, total });
        }
        Ok(())
    }

    /// Asks, and reads the answer to its end, within the time that the options give.
    async fn read(
        &self,
        question: &Question<'_>,
        options: GetOptions,
    ) -> Result<(Bytes, ObjectMeta), SourceError> {
        let received = AtomicU64::new(0);
        let timeout = self.options.timeout;
        let answer = self
            .store
            .get_opts(question.path, options)
            .map_err(|source| question.failed(source))
            .and_then(|result| read_answer(question, result, &received));
        tokio::time::timeout(timeout, answer)
            .await
            .unwrap_or_else(|_| {
                let received = received.load(Ordering::Relaxed);
                Err(SourceError::Timeout {
                    url: question.url.to_owned(),
                    tensor: question.tensor_at(question.range.start.saturating_add(received)),
                    range: question.range.clone(),
                    received,
                    timeout,
                })
            })
    }
}

/// Reads an answer whose length is known: its file's where a whole file was asked for, of at most the question's length, else
/// the question's, cut at the end of the file while the file is not known.
async fn read_answer(
    question: &Question<'_>,
    result: GetResult,
    received: &AtomicU64,
) -> Result<(Bytes, ObjectMeta), SourceError> {
    let meta = result.meta.clone();
    if let Some((file, _)) = question.known {
        file.check(&meta, || question.tensor_at(question.range.start))?;
    }
    let expected = result.range.end - result.range.start;
    let limit = question.range.end - question.range.start;
    if expected > limit {
        // Ranges are the question's: this is the whole of a config.
        return Err(SourceError::ConfigTooLarge {
            url: question.url.to_owned(),
            bytes: expected,
            limit,
        });
    }
    // What a header promises is not allocated before it comes.
    let mut bytes = BytesMut::with_capacity(expected.min(FIRST_BYTES) as usize);
    let mut answer = result.into_stream();
    while bytes.len() as u64 <= expected
        && let Some(chunk) = answer.next().await
    {
        bytes.extend_from_slice(&chunk.map_err(|source| question.failed(source))?);
        received.store(bytes.len() as u64, Ordering::Relaxed);
    }
    let received = bytes.len() as u64;
    if received != expected {
        let at = question.range.start + received.min(expected.saturating_sub(1));
        return Err(SourceError::Length {
            url: question.url.to_owned(),
            tensor: question.tensor_at(at),
            range: question.range.start..question.range.start + expected,
            received,
        });
    }
    Ok((bytes.freeze(), meta))
}

fn ranged(range: &Range<u64>) -> GetOptions {
    GetOptions {
        range: Some(GetRange::Bounded(range.clone())),
        ..GetOptions::default()
    }
}
