//! The public items of a library: what can be reached from its root through public modules and `pub use`.

use super::modules::{Library, ModulePath, Target, is_test_only, item_name};
use anyhow::Result;
use std::collections::{BTreeMap, BTreeSet};
use syn::{Attribute, Fields, ImplItem, Item, TraitItem, Visibility};

/// One line an item, `kind path`, sorted by path; what needs a feature says so.
pub(super) fn list(library: &Library) -> Result<Vec<String>> {
    let mut surface = Surface {
        library,
        methods: methods(library)?,
        found: BTreeSet::new(),
    };
    surface.module(&Vec::new(), "", &[])?;
    let lines = surface.found.into_iter();
    Ok(lines
        .map(|line| {
            let Line { path, kind, on } = line;
            match on.as_str() {
                "" => format!("{kind} {path}"),
                on => format!("{kind} {path}  [{on}]"),
            }
        })
        .collect())
}

/// A line in its order.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Line {
    path: String,
    kind: String,
    /// Features and targets that it needs.
    on: String,
}

/// An associated item of a type: kind, name, conditions.
type Member = (&'static str, String, Vec<String>);

/// Public associated items of inherent impls, by the type's module and name.
fn methods(library: &Library) -> Result<BTreeMap<(ModulePath, String), Vec<Member>>> {
    let mut found: BTreeMap<_, Vec<Member>> = BTreeMap::new();
    for (path, module) in &library.modules {
        for item in &module.items {
            let Item::Impl(block) = item else { continue };
            let syn::Type::Path(of) = &*block.self_ty else {
                continue;
            };
            if block.trait_.is_some() || is_test_only(&block.attrs) {
                continue;
            }
            let name: Vec<String> = of
                .path
                .segments
                .iter()
                .map(|s| s.ident.to_string())
                .collect();
            let Target::Item(home, name) = library.resolve(path, &name)? else {
                continue;
            };
            let members = found.entry((home, name)).or_default();
            for item in &block.items {
                let (kind, name, attributes) = match item {
                    ImplItem::Fn(f) if is_public(&f.vis) => ("fn", &f.sig.ident, &f.attrs),
                    ImplItem::Const(c) if is_public(&c.vis) => ("const", &c.ident, &c.attrs),
                    ImplItem::Type(t) if is_public(&t.vis) => ("type", &t.ident, &t.attrs),
                    _ => continue,
                };
                if !is_test_only(attributes) {
                    let on = conditions(&conditions(&[], &block.attrs), attributes);
                    members.push((kind, name.to_string(), on));
                }
            }
        }
    }
    Ok(found)
}

fn is_public(visibility: &Visibility) -> bool {
    matches!(visibility, Visibility::Public(_))
}

/// `outer` and the `cfg`s among `attributes`, in words.
fn conditions(outer: &[String], attributes: &[Attribute]) -> Vec<String> {
    let mut all = outer.to_vec();
    for attribute in attributes {
        if let syn::Meta::List(list) = &attribute.meta
            && list.path.is_ident("cfg")
        {
            let words = list.tokens.to_string().replace(" = ", " ").replace('"', "");
            if !all.contains(&words) {
                all.push(words);
            }
        }
    }
    all
}

struct Surface<'a> {
    library: &'a Library,
    methods: BTreeMap<(ModulePath, String), Vec<Member>>,
    found: BTreeSet<Line>,
}

impl Surface<'_> {
    fn add(&mut self, kind: &str, path: String, on: &[String]) {
        self.found.insert(Line {
            path,
            kind: kind.to_owned(),
            on: on.join(", "),
        });
    }

    /// Everything public of `module`, under the public path `prefix` (empty, or with trailing `::`).
    fn module(&mut self, module: &ModulePath, prefix: &str, on: &[String]) -> Result<()> {
        let declared = &self.library.modules[module];
        for item in &declared.items {
            if let Some(name) = item_name(item)
                && item_visibility(item).is_some_and(is_public)
            {
                let mut path = module.clone();
                let target = if matches!(item, Item::Mod(_)) {
                    path.push(name.clone());
                    Target::Module(path)
                } else {
                    Target::Item(path, name.clone())
                };
                self.target(
                    &target,
                    &format!("{prefix}{name}"),
                    &conditions(on, attributes(item)),
                )?;
            }
        }
        for import in declared.imports.iter().filter(|i| i.public) {
            let on = conditions(on, &import.attributes);
            let target = self.library.resolve(module, &import.path)?;
            match (&import.name, &target) {
                (Some(name), _) => self.target(&target, &format!("{prefix}{name}"), &on)?,
                (None, Target::Module(other)) => self.module(other, prefix, &on)?,
                (None, _) => {
                    self.add(
                        "use",
                        format!("{prefix}* = {}::*", import.path.join("::")),
                        &on,
                    );
                }
            }
        }
        Ok(())
    }

    fn target(&mut self, target: &Target, shown: &str, on: &[String]) -> Result<()> {
        match target {
            Target::Module(module) => {
                self.add("mod", shown.to_owned(), on);
                self.module(module, &format!("{shown}::"), on)
            }
            Target::Foreign(path) => {
                self.add("use", format!("{shown} = {}", path.join("::")), on);
                Ok(())
            }
            Target::Item(module, name) => {
                let declared = &self.library.modules[module].items;
                for item in declared
                    .iter()
                    .filter(|i| item_name(i).as_deref() == Some(name))
                {
                    self.item(item, shown, &conditions(on, attributes(item)));
                }
                let members = self.methods.get(&(module.clone(), name.clone())).cloned();
                for (kind, name, more) in members.into_iter().flatten() {
                    let on: Vec<String> = on.iter().cloned().chain(more).collect();
                    self.add(kind, format!("{shown}::{name}"), &on);
                }
                Ok(())
            }
        }
    }

    /// An item with its public fields, variants or trait items.
    fn item(&mut self, item: &Item, shown: &str, on: &[String]) {
        let kind = match item {
            Item::Const(_) => "const",
            Item::Enum(_) => "enum",
            Item::Fn(_) => "fn",
            Item::Static(_) => "static",
            Item::Struct(_) => "struct",
            Item::Trait(_) => "trait",
            Item::Type(_) => "type",
            Item::Union(_) => "union",
            _ => return,
        };
        self.add(kind, shown.to_owned(), on);
        match item {
            Item::Struct(declared) => self.fields(&declared.fields, shown, on),
            Item::Enum(declared) => {
                for variant in &declared.variants {
                    let names: Vec<String> = variant
                        .fields
                        .iter()
                        .enumerate()
                        .map(|(at, f)| f.ident.as_ref().map_or(at.to_string(), ToString::to_string))
                        .collect();
                    let fields = match names.as_slice() {
                        [] => String::new(),
                        names => format!(" {{{}}}", names.join(", ")),
                    };
                    self.add("variant", format!("{shown}::{}{fields}", variant.ident), on);
                }
            }
            Item::Trait(declared) => {
                for item in &declared.items {
                    let (kind, name) = match item {
                        TraitItem::Fn(f) => ("fn", &f.sig.ident),
                        TraitItem::Const(c) => ("const", &c.ident),
                        TraitItem::Type(t) => ("type", &t.ident),
                        _ => continue,
                    };
                    self.add(kind, format!("{shown}::{name}"), on);
                }
            }
            _ => {}
        }
    }

    fn fields(&mut self, fields: &Fields, shown: &str, on: &[String]) {
        for (at, field) in fields.iter().enumerate().filter(|(_, f)| is_public(&f.vis)) {
            let name = field
                .ident
                .as_ref()
                .map_or(at.to_string(), ToString::to_string);
            self.add("field", format!("{shown}::{name}"), on);
        }
    }
}

fn item_visibility(item: &Item) -> Option<&Visibility> {
    Some(match item {
        Item::Const(i) => &i.vis,
        Item::Enum(i) => &i.vis,
        Item::Fn(i) => &i.vis,
        Item::Static(i) => &i.vis,
        Item::Struct(i) => &i.vis,
        Item::Trait(i) => &i.vis,
        Item::Type(i) => &i.vis,
        Item::Union(i) => &i.vis,
        Item::Mod(i) => &i.vis,
        _ => return None,
    })
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(i) => &i.attrs,
        Item::Enum(i) => &i.attrs,
        Item::Fn(i) => &i.attrs,
        Item::Static(i) => &i.attrs,
        Item::Struct(i) => &i.attrs,
        Item::Trait(i) => &i.attrs,
        Item::Type(i) => &i.attrs,
        Item::Union(i) => &i.attrs,
        Item::Mod(i) => &i.attrs,
        _ => &[],
    }
}
